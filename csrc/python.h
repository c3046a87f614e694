// C++ functions of numbers and addresses as functions of a Python module, by the limited API: one binary serves CPython
// 3.11 and all that follow.
#pragma once
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <exception>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace lora_merge::python {

// ---- arguments -----------------------------------------------------------------------------------------------------

template <class T>
T number(PyObject* value) {
  if constexpr (std::is_pointer_v<T>) {
    return static_cast<T>(PyLong_AsVoidPtr(value));  // of None: an error; of 0: null
  } else if constexpr (std::is_same_v<T, bool>) {
    return PyObject_IsTrue(value) == 1;
  } else {
    static_assert(std::is_same_v<T, int64_t>);
    return PyLong_AsLongLong(value);
  }
}

// How many of them a parameter takes: a struct (layout.h) as many as it has fields.
template <class T>
constexpr size_t words_of() {
  if constexpr (std::is_class_v<T>) return std::tuple_size_v<decltype(std::declval<T&>().all())>;
  else return 1;
}

template <class T>
void read(PyObject* const*& next, T& value) {
  if constexpr (std::is_class_v<T>) std::apply([&](auto&... field) { (read(next, field), ...); }, value.all());
  else value = number<T>(*next++);
}

// ---- results -------------------------------------------------------------------------------------------------------

inline PyObject* object(bool value) { return PyBool_FromLong(value); }
inline PyObject* object(int64_t value) { return PyLong_FromLongLong(value); }
inline PyObject* object(const std::string& value) { return PyUnicode_FromStringAndSize(value.data(), value.size()); }
template <class T>
PyObject* object(const std::vector<T>& values) {
  PyObject* list = PyList_New(values.size());
  for (size_t i = 0; list != nullptr && i < values.size(); ++i) {
    PyObject* item = object(values[i]);
    if (item == nullptr || PyList_SetItem(list, i, item) != 0) {
      Py_DECREF(list);
      return nullptr;
    }
  }
  return list;
}

// ---- calls ---------------------------------------------------------------------------------------------------------

// The Python warning to issue once a function has returned; empty: none.
std::string take_warning();

// Other threads of Python run meanwhile.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(state_); }
  WithoutGil(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

template <class Result, class... T>
PyObject* call(Result (*function)(T...), PyObject* const* arguments) {
  std::tuple<T...> values;
  std::apply([&](T&... value) { (read(arguments, value), ...); }, values);
  if (PyErr_Occurred() != nullptr) return nullptr;
  try {
    if constexpr (std::is_void_v<Result>) {
      {
        const WithoutGil unlocked;
        std::apply(function, values);
      }
      Py_INCREF(Py_None);
      return Py_None;
    } else {
      const Result result = [&] {
        const WithoutGil unlocked;
        return std::apply(function, values);
      }();
      return object(result);
    }
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

template <class Result, class... T>
PyObject* counted(const char* name, Result (*function)(T...), PyObject* const* arguments, Py_ssize_t count) {
  constexpr Py_ssize_t wanted = (0 + ... + words_of<T>());
  if (count != wanted) {
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, got %zd", name, wanted, count);
    return nullptr;
  }
  PyObject* result = call(function, arguments);
  const std::string warning = take_warning();
  if (result != nullptr && !warning.empty() && PyErr_WarnEx(PyExc_UserWarning, warning.c_str(), 1) != 0) {
    Py_DECREF(result);
    return nullptr;
  }
  return result;
}

}  // namespace lora_merge::python
