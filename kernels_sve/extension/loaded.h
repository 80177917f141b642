// Functions of the libraries that torch has loaded, found by name: the extension links none of them.
#pragma once
#include <dlfcn.h>

namespace fm {

// A symbol of a library of this process or of the libraries that it needs; null when there is none.
inline void* loaded_symbol(const char* library, const char* name) {
  void* handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  return handle ? dlsym(handle, name) : nullptr;
}

}  // namespace fm
