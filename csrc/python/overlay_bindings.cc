// Client and agents.  Blocking calls release the GIL and look for signals ten times a second.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "net/loop.h"
#include "net/version.h"
#include "overlay/agent_list.h"
#include "overlay/client.h"

namespace commkit {

namespace py = pybind11;

namespace {

void look_for_signals() {
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

KvReply key_call(Client& client, KvOp op, const std::string& key, double timeout,
                 const std::string& value = "", const std::string& expected = "",
                 int64_t amount = 0) {
  KvRequest request;
  request.op = op;
  request.key = key;
  request.value = value;
  request.expected = expected;
  request.amount = amount;
  KvReply reply;
  {
    py::gil_scoped_release release;
    reply = client.key(std::move(request), timeout, look_for_signals);
  }
  bool may_miss =
      op == KvOp::kGet || op == KvOp::kCheck || op == KvOp::kQueuePop || op == KvOp::kDelete;
  if (!reply.found && !may_miss)
    throw Failure("usage", "key '" + key.substr(0, 80) + "': " + reply.value);
  return reply;
}

// The reader thread, which is joined here, may be waiting for the GIL.
struct WithoutGil {
  void operator()(Client* client) const {
    py::gil_scoped_release release;
    if (client->on_reader()) {
      // The last reference went away inside a notice; the reader cannot wait for itself.
      std::thread([client] { delete client; }).detach();
      return;
    }
    delete client;
  }
};
using ClientPtr = std::unique_ptr<Client, WithoutGil>;

ClientPtr make_client(const Fields& config, double timeout, const py::object& notice) {
  Client::Notice call;
  if (!notice.is_none()) {
    // Destroyed wherever the client is, so it must take the GIL itself.
    auto held = std::shared_ptr<py::object>(new py::object(notice), [](py::object* object) {
      py::gil_scoped_acquire gil;
      delete object;
    });
    call = [held](const std::string& kind, const std::string& text) {
      py::gil_scoped_acquire gil;
      try {
        (*held)(kind, text);
      } catch (py::error_already_set& error) {
        // A signal's exception is for whoever waits, not for the log: it is raised there.
        if (!error.matches(PyExc_Exception)) PyErr_SetInterrupt();
        error.discard_as_unraisable("commkit notice");
      }
    };
  }
  py::gil_scoped_release release;
  return ClientPtr(new Client(config, timeout, std::move(call), look_for_signals));
}

std::vector<py::bytes> as_bytes(const std::vector<std::string>& values) {
  std::vector<py::bytes> out;
  out.reserve(values.size());
  for (const auto& value : values) out.emplace_back(value);
  return out;
}

}  // namespace

void register_overlay(py::module_& m) {
  static py::exception<Failure> failure(m, "Failure");
  py::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const Failure& error) {
      PyErr_SetObject(failure.ptr(), py::make_tuple(error.kind, std::string(error.what())).ptr());
    }
  });

  py::class_<Client, ClientPtr>(m, "Client")
      .def(py::init(&make_client), py::arg("config"), py::arg("timeout"), py::arg("notice"))
      .def(
          "formed", [](Client& c, double timeout) { c.formed(timeout, look_for_signals); },
          py::arg("timeout"), py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("info", &Client::info)
      .def(
          "root_endpoint",
          [](Client& c, double timeout) { return c.root_endpoint(timeout, look_for_signals); },
          py::arg("timeout"), py::call_guard<py::gil_scoped_release>())
      .def(
          "gather",
          [](Client& c, const std::string& tag, const py::bytes& payload, int dst, int rank,
             double timeout) -> py::object {
            std::string bytes = payload;
            std::vector<std::string> result;
            {
              py::gil_scoped_release release;
              result = c.operation(kGather, tag, dst, true, bytes, "", timeout, look_for_signals);
            }
            if (dst >= 0 && dst != rank) return py::none();
            return py::cast(as_bytes(result));
          },
          py::arg("tag"), py::arg("payload"), py::arg("dst"), py::arg("rank"), py::arg("timeout"))
      .def(
          "broadcast",
          [](Client& c, const std::string& tag, const py::object& payload, int src,
             double timeout) {
            bool gives = !payload.is_none();
            std::string bytes = gives ? std::string(py::bytes(payload)) : std::string();
            std::vector<std::string> result;
            {
              py::gil_scoped_release release;
              result =
                  c.operation(kBroadcast, tag, src, gives, bytes, "", timeout, look_for_signals);
            }
            return py::bytes(result.at(0));
          },
          py::arg("tag"), py::arg("payload"), py::arg("src"), py::arg("timeout"))
      .def(
          "agree",
          [](Client& c, const std::string& tag, const py::bytes& digest,
             const std::string& description, double timeout) {
            std::string bytes = digest;
            py::gil_scoped_release release;
            c.operation(kAgree, tag, -1, true, bytes, description, timeout, look_for_signals);
          },
          py::arg("tag"), py::arg("digest"), py::arg("description"), py::arg("timeout"))
      .def(
          "set",
          [](Client& c, const std::string& key, const std::string& value, double timeout) {
            key_call(c, KvOp::kSet, key, timeout, value);
          },
          py::arg("key"), py::arg("value"), py::arg("timeout"))
      .def(
          "get",
          [](Client& c, const std::vector<std::string>& keys, double timeout) {
            double deadline = now() + timeout;
            std::vector<py::bytes> out;
            for (const auto& key : keys) {
              // A key may be deleted between its appearance and its reading: then it is waited for
              // again.
              for (;;) {
                double left = std::max(0.0, deadline - now());
                KvReply reply = key_call(c, KvOp::kWait, key, left);
                // Most often the value comes with the answer.
                if (reply.number >= 0) {
                  reply = key_call(c, KvOp::kGet, key, std::max(1.0, left));
                  if (!reply.found) continue;
                }
                out.emplace_back(reply.value);
                break;
              }
            }
            return out;
          },
          py::arg("keys"), py::arg("timeout"))
      .def(
          "check",
          [](Client& c, const std::vector<std::string>& keys, double timeout) {
            for (const auto& key : keys) {
              if (!key_call(c, KvOp::kCheck, key, timeout).found) return false;
            }
            return true;
          },
          py::arg("keys"), py::arg("timeout"))
      .def(
          "wait",
          [](Client& c, const std::vector<std::string>& keys, double timeout) {
            double deadline = now() + timeout;
            for (const auto& key : keys)
              key_call(c, KvOp::kWait, key, std::max(0.0, deadline - now()));
          },
          py::arg("keys"), py::arg("timeout"))
      .def(
          "add",
          [](Client& c, const std::string& key, int64_t amount, double timeout) {
            return key_call(c, KvOp::kAdd, key, timeout, "", "", amount).number;
          },
          py::arg("key"), py::arg("amount"), py::arg("timeout"))
      .def(
          "compare_set",
          [](Client& c, const std::string& key, const std::string& expected,
             const std::string& desired, double timeout) {
            return py::bytes(key_call(c, KvOp::kCompareSet, key, timeout, desired, expected).value);
          },
          py::arg("key"), py::arg("expected"), py::arg("desired"), py::arg("timeout"))
      .def(
          "append",
          [](Client& c, const std::string& key, const std::string& value, double timeout) {
            key_call(c, KvOp::kAppend, key, timeout, value);
          },
          py::arg("key"), py::arg("value"), py::arg("timeout"))
      .def(
          "delete",
          [](Client& c, const std::string& key, double timeout) {
            return key_call(c, KvOp::kDelete, key, timeout).found;
          },
          py::arg("key"), py::arg("timeout"))
      .def(
          "num_keys",
          [](Client& c, double timeout) { return key_call(c, KvOp::kNumKeys, "", timeout).number; },
          py::arg("timeout"))
      .def(
          "list_keys",
          [](Client& c, double timeout) {
            return as_bytes(key_call(c, KvOp::kListKeys, "", timeout).keys);
          },
          py::arg("timeout"))
      .def(
          "queue_push",
          [](Client& c, const std::string& key, const std::string& value, double timeout) {
            key_call(c, KvOp::kQueuePush, key, timeout, value);
          },
          py::arg("key"), py::arg("value"), py::arg("timeout"))
      .def(
          "queue_pop",
          [](Client& c, const std::string& key, bool block, double timeout) {
            KvReply reply = key_call(c, KvOp::kQueuePop, key, timeout, "", "", block ? 1 : 0);
            if (!reply.found)
              throw Failure("timeout", "queue '" + key.substr(0, 80) + "' is empty");
            return py::bytes(reply.value);
          },
          py::arg("key"), py::arg("block"), py::arg("timeout"))
      .def(
          "queue_len",
          [](Client& c, const std::string& key, double timeout) {
            return key_call(c, KvOp::kQueueLen, key, timeout).number;
          },
          py::arg("key"), py::arg("timeout"))
      .def("creating", &Client::creating, py::arg("on"), py::call_guard<py::gil_scoped_release>())
      .def(
          "connected",
          [](Client& c, const std::string& group, const std::vector<int>& members) {
            RankSet set;
            for (int rank : members) {
              if (rank < 0 || rank > kMostRanks)
                throw Failure("usage", "group '" + group + "': rank " + std::to_string(rank));
              if (!set.contains(rank)) set.add(rank);
            }
            py::gil_scoped_release release;
            c.connected(group, set);
          },
          py::arg("group"), py::arg("members"))
      .def("note", &Client::note, py::arg("key"), py::arg("value"),
           py::call_guard<py::gil_scoped_release>())
      .def("failures", &Client::failures)
      .def(
          "leave", [](Client& c, double timeout) { return c.leave(timeout, look_for_signals); },
          py::arg("timeout"), py::call_guard<py::gil_scoped_release>())
      .def("exiting", &Client::exiting, py::arg("reason"), py::call_guard<py::gil_scoped_release>())
      .def("close", &Client::close, py::call_guard<py::gil_scoped_release>());

  m.def("release", &release);
  m.def("protocol_version", &protocol_version);
  m.def("agents", [] {
    std::vector<Fields> out;
    py::gil_scoped_release release;
    for (const auto& name : agent_names()) {
      Fields fields = inspect_agent(name, false, 1.0);
      if (fields.empty()) fields = {{"name", name}, {"state", "does not answer"}};
      out.push_back(std::move(fields));
    }
    return out;
  });
  m.def(
      "stop_agent",
      [](const std::string& name, double timeout) {
        py::gil_scoped_release release;
        if (inspect_agent(name, true, timeout).empty()) {
          throw Failure("agent", "agent '" + name +
                                     "' does not answer; `commkit agents` lists those that do");
        }
      },
      py::arg("name"), py::arg("timeout"));
}

}  // namespace commkit
