// How objects are noted, and looked at again. See watch.h.
#include "watch.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace lora_merge::watch {
namespace {

// What is kept of a value, in the low bits of its address: objects lie at multiples of 8.
enum Tag : uintptr_t {
  kObject = 0,  // is this very object, or absent (0)
  kNodes = 1,   // a dict: how many keys; each of them, and which object it holds
  kValues = 2,  // a dict: how many keys; each of them, and its value
  kList = 3,    // a list: how many values; each of them
  kSet = 4,     // a set; this is a frozenset that equals it
  kValue = 5,   // equals this one, of a type whose objects never change
  kTyped = 6,   // is this very object, whose type follows
};
constexpr uintptr_t kTags = 7;

uintptr_t word(const void* pointer, Tag tag = kObject) { return reinterpret_cast<uintptr_t>(pointer) | tag; }
PyObject* object_of(uintptr_t word) { return reinterpret_cast<PyObject*>(word & ~kTags); }

bool plain(PyObject* value) {
  return value == Py_None || PyBool_Check(value) || PyFloat_CheckExact(value) || PyUnicode_CheckExact(value) ||
         PyLong_CheckExact(value) || Py_IS_TYPE(value, &PyType_Type);
}

// Of two values that never change. No code of a user's runs.
bool equal(PyObject* here, PyObject* noted) {
  if (here == noted) return true;
  if (Py_TYPE(here) != Py_TYPE(noted)) return false;
  if (PyFloat_CheckExact(here)) return PyFloat_AsDouble(here) == PyFloat_AsDouble(noted);
  if (PyUnicode_CheckExact(here)) return PyUnicode_Compare(here, noted) == 0;
  return PyLong_CheckExact(here) && PyObject_RichCompareBool(here, noted, Py_EQ) == 1;
}

// The object's `__dict__`, borrowed of it; null where it has none.
PyObject* inside_of(PyObject* object) {
  PyObject* inside = PyObject_GenericGetDict(object, nullptr);
  Py_XDECREF(inside);
  return inside;
}

bool of_slot(char kind) { return kind == 'T' || kind == 'O'; }

// What lies in a slot of an object, borrowed of it; null where its class has no such slot, or nothing is in it.
PyObject* slot_of(PyObject* object, PyObject* name) {
  PyObject* slot = PyObject_GetAttr(reinterpret_cast<PyObject*>(Py_TYPE(object)), name);
  const bool there = slot != nullptr && Py_IS_TYPE(slot, &PyMemberDescr_Type);
  Py_XDECREF(slot);
  PyObject* value = there ? PyObject_GenericGetAttr(object, name) : nullptr;
  if (value == nullptr) PyErr_Clear();
  Py_XDECREF(value);
  return value;
}

PyObject* value_of(PyObject* object, PyObject* inside, const Column& column) {
  return of_slot(column.kind) ? slot_of(object, column.name) : PyDict_GetItemWithError(inside, column.name);
}

std::array<uintptr_t, 3> facts(const DLTensor& t) {
  const auto join = [](auto high, auto low) {
    return static_cast<uintptr_t>(static_cast<uint64_t>(high) << 32 | static_cast<uint32_t>(low));
  };
  return {reinterpret_cast<uintptr_t>(t.data) + t.byte_offset, join(t.device.device_type, t.device.device_id),
          join(t.ndim, t.dtype.code | t.dtype.bits << 8 | t.dtype.lanes << 16)};
}

}  // namespace

// ---- noting --------------------------------------------------------------------------------------------------------

PyObject* Watch::hold(PyObject* object) {
  if (held_.insert(object).second) Py_INCREF(object);
  return object;
}

void Watch::note_typed(PyObject* value, std::vector<uintptr_t>& words) {
  words.push_back(word(value, kTyped));
  words.push_back(word(hold(reinterpret_cast<PyObject*>(Py_TYPE(value)))));
}

bool Watch::note_value(PyObject* value, std::vector<uintptr_t>& words) {
  if (!plain(value)) return false;
  words.push_back(word(hold(value), kValue));
  return true;
}

bool Watch::note_dict(PyObject* dict, char kind, std::vector<uintptr_t>& words) {
  words.push_back(kind == 'n' ? kNodes : kValues);
  words.push_back(static_cast<uintptr_t>(PyDict_Size(dict)));
  PyObject *key = nullptr, *value = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &key, &value);) {
    if (!PyUnicode_CheckExact(key)) return false;
    words.push_back(word(hold(key)));
    if (kind == 'n') {
      words.push_back(word(value));
      reachable_.emplace(value, groups_.size());
    } else if (kind == 't') {
      note_typed(value, words);
    } else if (!note_value(value, words)) {
      return false;
    }
  }
  return true;
}

// Of kinds: 'n', a dict of objects that may be looked at; 'v', a value that never changes, or a dict, list or set of
// them; 't', an object, or a dict of them, each with its type. Of slots: 'T', an object with its type; 'O', one that may
// be looked at.
bool Watch::note(PyObject* value, char kind, std::vector<uintptr_t>& words) {
  if (value == nullptr) {
    words.push_back(0);
    return kind == 'v' || kind == 't';
  }
  if (kind == 'O') reachable_.emplace(value, groups_.size());
  if (of_slot(kind)) return (note_typed(value, words), true);
  if (PyDict_CheckExact(value)) return note_dict(value, kind, words);
  if (kind == 'n') return false;
  if (kind == 't') return (note_typed(value, words), true);
  if (PyList_CheckExact(value)) {
    const Py_ssize_t count = PyList_Size(value);
    words.push_back(kList);
    words.push_back(static_cast<uintptr_t>(count));
    for (Py_ssize_t i = 0; i < count; ++i)
      if (!note_value(PyList_GetItem(value, i), words)) return false;
    return true;
  }
  if (Py_IS_TYPE(value, &PySet_Type)) {
    PyObject* copy = PyFrozenSet_New(value);
    if (copy == nullptr) return false;
    held_.insert(copy);
    words.push_back(word(copy, kSet));
    return true;
  }
  return note_value(value, words);
}

// The last group, or a new one where that has other columns, or reaches the object.
Group& Watch::room_for(PyObject* object, PyObject* names, const char* kinds) {
  const size_t width = std::strlen(kinds);
  bool fits = !groups_.empty() && groups_.back().columns.size() == width && reachable_[object] < groups_.size();
  for (size_t k = 0; fits && k < width; ++k)
    fits = groups_.back().columns[k].name == PyTuple_GetItem(names, k) && groups_.back().columns[k].kind == kinds[k];
  if (!fits) {
    groups_.emplace_back();
    for (size_t k = 0; k < width; ++k)
      groups_.back().columns.push_back({hold(PyTuple_GetItem(names, k)), kinds[k], {}});
  }
  return groups_.back();
}

bool Watch::add(PyObject* objects, PyObject* insides, PyObject* names, const char* kinds) {
  const Py_ssize_t count = PyList_Size(objects);
  if (PyList_Size(insides) != count || static_cast<Py_ssize_t>(std::strlen(kinds)) != PyTuple_Size(names)) return false;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject *object = PyList_GetItem(objects, i), *inside = PyList_GetItem(insides, i);
    if (reachable_.count(object) == 0 || !PyDict_CheckExact(inside) || inside_of(object) != inside) return false;
    Group& group = room_for(object, names, kinds);
    group.objects.push_back(object);
    group.types.push_back(Py_TYPE(object));
    group.insides.push_back(inside);
    hold(reinterpret_cast<PyObject*>(Py_TYPE(object)));
    for (Column& column : group.columns)
      if (!note(value_of(object, inside, column), column.kind, column.words)) return false;
  }
  return true;
}

bool Watch::add_tensors(PyObject* tensors, PyObject* storages) {
  if (PyList_Size(storages) != PyList_Size(tensors)) return false;
  groups_.emplace_back();
  Group& group = groups_.back();
  for (Py_ssize_t i = 0; i < PyList_Size(tensors); ++i) {
    PyObject* tensor = PyList_GetItem(tensors, i);
    DLTensor t;
    if (reachable_.count(tensor) == 0 || look_(tensor, &t) != 0) return false;
    group.objects.push_back(tensor);
    group.types.push_back(Py_TYPE(tensor));
    group.insides.push_back(static_cast<PyObject*>(PyLong_AsVoidPtr(PyList_GetItem(storages, i))));
    hold(reinterpret_cast<PyObject*>(Py_TYPE(tensor)));
    for (uintptr_t fact : facts(t)) group.words.push_back(fact);
    for (int32_t d = 0; d < t.ndim; ++d) {
      group.words.push_back(static_cast<uintptr_t>(t.shape[d]));
      group.words.push_back(static_cast<uintptr_t>(t.strides[d]));
    }
  }
  return true;
}

bool Watch::give(PyObject* objects) {
  given_.emplace_back();
  for (Py_ssize_t i = 0; i < PyList_Size(objects); ++i) {
    given_.back().push_back(PyList_GetItem(objects, i));
    if (reachable_.count(given_.back().back()) == 0) return false;
  }
  return true;
}

// ---- looking again -------------------------------------------------------------------------------------------------

namespace {

// Each reads what was noted from `at` on, and leaves `at` behind it.
bool same_value(PyObject* here, const uintptr_t*& at) {
  const uintptr_t noted = *at++;
  if ((noted & kTags) == kValue) return equal(here, object_of(noted));
  return here == object_of(noted) && word(Py_TYPE(here)) == *at++;
}

bool same_dict(PyObject* dict, bool nodes, const uintptr_t*& at) {
  if (!PyDict_CheckExact(dict) || static_cast<uintptr_t>(PyDict_Size(dict)) != *at++) return false;
  PyObject *key = nullptr, *value = nullptr;
  for (Py_ssize_t i = 0; PyDict_Next(dict, &i, &key, &value);) {
    if (word(key) != *at++) return false;
    if (nodes ? word(value) != *at++ : !same_value(value, at)) return false;
  }
  return true;
}

bool same_list(PyObject* list, const uintptr_t*& at) {
  if (!PyList_CheckExact(list)) return false;
  const Py_ssize_t count = PyList_Size(list);
  if (static_cast<uintptr_t>(count) != *at++) return false;
  for (Py_ssize_t i = 0; i < count; ++i)
    if (!same_value(PyList_GetItem(list, i), at)) return false;
  return true;
}

bool same(PyObject* here, const uintptr_t*& at) {
  const uintptr_t noted = *at;
  if (here == nullptr || noted == 0) return (++at, here == nullptr && noted == 0);
  switch (noted & kTags) {
    case kNodes: return (++at, same_dict(here, true, at));
    case kValues: return (++at, same_dict(here, false, at));
    case kList: return (++at, same_list(here, at));
    case kSet:
      return (++at, Py_IS_TYPE(here, &PySet_Type) && PyObject_RichCompareBool(here, object_of(noted), Py_EQ) == 1);
    default: return same_value(here, at);
  }
}

bool same_tensor(const DLTensor& t, const uintptr_t*& at) {
  for (uintptr_t fact : facts(t))
    if (fact != *at++) return false;
  for (int32_t d = 0; d < t.ndim; ++d)
    if (static_cast<uintptr_t>(t.shape[d]) != *at++ || static_cast<uintptr_t>(t.strides[d]) != *at++) return false;
  return true;
}

// Most of the time goes to waiting for memory: a model lies in tens of megabytes of small objects. So these are looked
// at in short loops, one thing of some objects at a time, in which the CPU waits for several at once; and what a later
// loop will look at is asked for, little by little: of a burst, CPUs forget what is beyond some twenty lines. (Inlined,
// as compilers leave out calls of functions that do nothing else.)
constexpr size_t kTogether = 32, kAhead = 8, kLine = 64;

[[gnu::always_inline]] inline void ask(const void* place, size_t begin, size_t bytes) {
  const char* at = static_cast<const char*>(place) + begin;
  for (size_t line = 0; place != nullptr && line < bytes; line += kLine) __builtin_prefetch(at + line);
}

// What a word of a live object may point to. It is only a guess at what is there, and nothing depends on it but time.
[[gnu::always_inline]] inline void ask_behind(PyObject* object, int word, size_t bytes) {
  const void* place = nullptr;
  std::memcpy(&place, reinterpret_cast<const char*>(object) + word * sizeof place, sizeof place);
  ask(place, 0, bytes);
}

// A dict's table, and its values where they lie apart.
[[gnu::always_inline]] inline void ask_table(PyObject* dict) {
  ask_behind(dict, 4, 2 * kLine);
  ask_behind(dict, 5, 3 * kLine);
}

bool same_tensors(const Group& group, DLPackDLTensorFromPyObjectNoSync look) {
  const uintptr_t* at = group.words.data();
  const size_t count = group.objects.size();
  for (size_t i = 0; i < count; ++i) {
    if (i + 2 * kAhead < count) ask(group.objects[i + 2 * kAhead], 0, kLine);
    if (i + kAhead < count) {
      ask_behind(group.objects[i + kAhead], 2, 4 * kLine);
      ask_behind(group.objects[i + kAhead], 3, 4 * kLine);
      ask(group.insides[i + kAhead], 0, 2 * kLine);
    }
    DLTensor t;
    if (Py_TYPE(group.objects[i]) != group.types[i] || look(group.objects[i], &t) != 0 || !same_tensor(t, at))
      return false;
  }
  return true;
}

bool same_objects(const Group& group) {
  PyObject* here[kTogether];
  std::vector<const uintptr_t*> at;
  for (const Column& column : group.columns) at.push_back(column.words.data());
  const size_t count = group.objects.size();
  for (size_t begin = 0; begin < count; begin += kTogether) {
    const size_t end = std::min(begin + kTogether, count);
    for (size_t i = begin; i < end; ++i) {
      if (Py_TYPE(group.objects[i]) != group.types[i]) return false;
      ask(group.insides[i], 0, kLine);
    }
    for (size_t i = begin; i < end; ++i) {
      if (inside_of(group.objects[i]) != group.insides[i]) return false;
      ask_table(group.insides[i]);
    }
    for (size_t k = 0; k < at.size(); ++k) {
      for (size_t i = begin; i < end; ++i) {
        here[i - begin] = value_of(group.objects[i], group.insides[i], group.columns[k]);
        ask(here[i - begin], 0, kLine);
      }
      for (size_t i = 0; i < end - begin; ++i)
        if (here[i] != nullptr && PyDict_CheckExact(here[i])) ask_table(here[i]);
      for (size_t i = begin; i < end; ++i) {
        if (k == 0 && i + kTogether < count) ask(group.objects[i + kTogether], -32, 2 * kLine);
        if (!same(here[i - begin], at[k])) return false;
      }
    }
  }
  return true;
}

}  // namespace

// Groups in their order: an object is touched when what holds it was found to hold it still.
bool Watch::unchanged(PyObject* root) const {
  if (root != root_) return false;
  for (const Group& group : groups_)
    if (!(group.columns.empty() ? same_tensors(group, look_) : same_objects(group))) return false;
  return true;
}

}  // namespace lora_merge::watch
