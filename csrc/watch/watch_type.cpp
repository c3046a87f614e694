// Watch as a Python type. See watch.h.
#include <new>

#include "../dlpack.h"
#include "../layout.h"
#include "watch.h"

namespace lora_merge::watch {
namespace {

struct Object {
  PyObject_HEAD Watch* watch;
};

Watch& of(PyObject* self) { return *reinterpret_cast<Object*>(self)->watch; }

// Whether nothing was raised. What cannot be looked at is not watched; there is nothing wrong with it.
bool quiet() {
  const bool raised = PyErr_Occurred() != nullptr;
  PyErr_Clear();
  return !raised;
}

// Whether it can be watched.
template <class Call>
PyObject* noted(const Call& call) {
  try {
    const bool noted = call();
    return PyBool_FromLong(quiet() && noted);
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
}

bool expect(const char* what, Py_ssize_t wanted, Py_ssize_t got) {
  if (wanted != got) PyErr_Format(PyExc_TypeError, "Watch.%s takes %zd arguments, got %zd", what, wanted, got);
  return wanted == got;
}

bool expect_list(PyObject* object) {
  if (!PyList_CheckExact(object)) PyErr_SetString(PyExc_TypeError, "a list is expected");
  return PyList_CheckExact(object);
}

PyObject* make(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject *root = nullptr, *exchange = nullptr;
  if (!PyArg_ParseTuple(arguments, "OO", &root, &exchange)) return nullptr;
  auto* api = static_cast<DLPackExchangeAPI*>(PyCapsule_GetPointer(exchange, "dlpack_exchange_api"));
  if (api == nullptr) return nullptr;
  if (api->header.version.major != 1 || api->dltensor_from_py_object_no_sync == nullptr) {
    PyErr_Format(PyExc_ValueError, "DLPack 1 with views of tensors is expected, got version %u",
                 api->header.version.major);
    return nullptr;
  }
  auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
  PyObject* self = allocate(type, 0);
  if (self == nullptr) return nullptr;
  auto* watch = new (std::nothrow) Watch(root, api->dltensor_from_py_object_no_sync);
  reinterpret_cast<Object*>(self)->watch = watch;
  if (watch == nullptr) {
    Py_DECREF(self);
    return PyErr_NoMemory();
  }
  return self;
}

void drop(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<Object*>(self)->watch;
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

PyObject* add(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (!expect("add", kWatchAdd, count) || !expect_list(arguments[0]) || !expect_list(arguments[1])) return nullptr;
  const char* kinds = PyUnicode_AsUTF8AndSize(arguments[3], nullptr);
  if (kinds == nullptr || PyTuple_Size(arguments[2]) < 0) return nullptr;
  return noted([&] { return of(self).add(arguments[0], arguments[1], arguments[2], kinds); });
}

PyObject* add_tensors(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (!expect("add_tensors", kWatchTensors, count)) return nullptr;
  if (!expect_list(arguments[0]) || !expect_list(arguments[1])) return nullptr;
  return noted([&] { return of(self).add_tensors(arguments[0], arguments[1]); });
}

PyObject* give(PyObject* self, PyObject* objects) {
  if (!expect_list(objects)) return nullptr;
  return noted([&] { return of(self).give(objects); });
}

PyObject* done(PyObject* self, PyObject*) {
  of(self).done();
  Py_RETURN_NONE;
}

PyObject* again(PyObject* self, PyObject* root) {
  const bool same = of(self).unchanged(root);
  if (!quiet() || !same) Py_RETURN_NONE;
  const auto& given = of(self).given();
  // All are held before anything is made, which may set off a collection.
  for (const auto& column : given)
    for (PyObject* object : column) Py_INCREF(object);
  PyObject* columns = PyTuple_New(given.size());
  for (size_t c = 0; c < given.size(); ++c) {
    PyObject* list = columns == nullptr ? nullptr : PyList_New(given[c].size());
    for (size_t i = 0; i < given[c].size(); ++i) {
      if (list == nullptr) {
        Py_DECREF(given[c][i]);
      } else {
        PyList_SetItem(list, i, given[c][i]);
      }
    }
    if (columns != nullptr && (list == nullptr || PyTuple_SetItem(columns, c, list) != 0)) Py_CLEAR(columns);
  }
  return columns;
}

template <class Function>
PyCFunction method(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {{"add", method(add), METH_FASTCALL, "Notes attributes of objects; False if that cannot be."},
                         {"add_tensors", method(add_tensors), METH_FASTCALL, "Notes tensors; False if that cannot be."},
                         {"give", give, METH_O, "Notes a list of what was noted, which `again` is to give."},
                         {"done", done, METH_NOARGS, "Nothing more is noted."},
                         {"again", again, METH_O, "The lists, if all is as it was; else None."},
                         {nullptr, nullptr, 0, nullptr}};

PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(make)},
                       {Py_tp_dealloc, reinterpret_cast<void*>(drop)},
                       {Py_tp_methods, methods},
                       {0, nullptr}};
PyType_Spec spec = {"lora_merge._C.Watch", sizeof(Object), 0, Py_TPFLAGS_DEFAULT, slots};

}  // namespace

PyObject* type() { return PyType_FromSpec(&spec); }

}  // namespace lora_merge::watch
