// The OpenMP runtime of the extension: the one that torch uses, whatever its name, so that a process has one team of threads.
#pragma once

namespace fm {

// Finds the runtime. False when torch has none and the system has no libgomp.
bool find_openmp();

}  // namespace fm
