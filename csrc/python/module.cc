#include <pybind11/pybind11.h>

namespace commkit {
void register_net(pybind11::module_& m);
void register_overlay(pybind11::module_& m);
}  // namespace commkit

PYBIND11_MODULE(_C, m) {
  m.doc() = "Native part of commkit; _C.pyi is its contract.";
  commkit::register_net(m);
  commkit::register_overlay(m);
}
