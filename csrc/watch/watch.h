// Watch: whether Python objects are still what a reading of them saw, without another reading.
#pragma once
#include <cstdint>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "../dlpack.h"
#include "../python.h"

namespace lora_merge::watch {

// One attribute of all objects of a group: of each what is there, as `Tag` (watch.cpp) says.
struct Column {
  PyObject* name;
  char kind;
  std::vector<uintptr_t> words;
};

// Some objects, none of which is reached through another one of them, and what is looked at in each.
struct Group {
  std::vector<PyObject*> objects;
  std::vector<PyTypeObject*> types;
  std::vector<PyObject*> insides;  // their dicts; of tensors where their storages are, or may have been
  std::vector<Column> columns;     // none: the objects are tensors
  std::vector<uintptr_t> words;    // what is known of these
};

class Watch {
 public:
  Watch(PyObject* root, DLPackDLTensorFromPyObjectNoSync look) : root_(root), look_(look) { reachable_[root] = 0; }

  ~Watch() {
    for (PyObject* object : held_) Py_DECREF(object);
  }

  // Each says whether that can be watched.
  bool add(PyObject* objects, PyObject* insides, PyObject* names, const char* kinds);
  bool add_tensors(PyObject* tensors, PyObject* storages);
  bool give(PyObject* objects);

  void done() { std::unordered_map<PyObject*, size_t>().swap(reachable_); }

  // Whether all is as it was.
  bool unchanged(PyObject* root) const;

  const std::vector<std::vector<PyObject*>>& given() const { return given_; }

 private:
  PyObject* hold(PyObject* object);
  void note_typed(PyObject* value, std::vector<uintptr_t>& words);
  bool note_value(PyObject* value, std::vector<uintptr_t>& words);
  bool note_dict(PyObject* dict, char kind, std::vector<uintptr_t>& words);
  bool note(PyObject* value, char kind, std::vector<uintptr_t>& words);
  Group& room_for(PyObject* object, PyObject* names, const char* kinds);

  PyObject* root_;
  DLPackDLTensorFromPyObjectNoSync look_;
  std::vector<Group> groups_;
  std::unordered_set<PyObject*> held_;               // what must stay alive: keys, types, values
  std::unordered_map<PyObject*, size_t> reachable_;  // what may be looked at -> the first group that may, or 0
  std::vector<std::vector<PyObject*>> given_;        // what `again` gives
};

// `Watch` as a Python type, a new reference (watch_type.cpp): it notes what a reading of live objects saw, and tells in
// one call whether it is the same still.
PyObject* type();

}  // namespace lora_merge::watch
