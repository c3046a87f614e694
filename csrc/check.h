// Errors that reach Python as RuntimeError.
#pragma once
#include <sstream>
#include <stdexcept>
#include <string>

namespace lora_merge {

template <class... Parts>
std::string joined(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

// Unless `fine`, throws what the parts say in a row.
template <class... Parts>
void check(bool fine, const Parts&... parts) {
  if (!fine) throw std::runtime_error(joined("lora_merge: ", parts...));
}

// A warning to Python, once the call that is under way has returned; only the last one of a call is issued.
void warn(std::string text);

}  // namespace lora_merge
