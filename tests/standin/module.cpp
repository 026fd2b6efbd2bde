#include "standin.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/extension.h>

namespace standin {

// -- in the place of NCCL: another backend of the CPU's, waited for at once -----------------------------------------------------

using Tensors = std::vector<at::Tensor>;
using Lists = std::vector<Tensors>;

struct Done final : c10d::Work {
  explicit Done(Tensors tensors) : tensors(std::move(tensors)) {
    finish();
    std::vector<c10::Device> devices;
    for (auto& t : this->tensors) {
      if (ours(t) && devices.empty()) devices.push_back(t.device());
    }
    future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    future->markCompleted(c10::IValue(this->tensors));
  }
  Tensors result() override { return tensors; }
  bool wait(std::chrono::milliseconds) override { return true; }
  void synchronize() override {}
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
  Tensors tensors;
  c10::intrusive_ptr<c10::ivalue::Future> future;
};

struct HostTimer final : c10d::Timer {  // which DDP wants
  explicit HostTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event from, Event to) override {
    auto a = getTimestamp(from), b = getTimestamp(to);
    return a && b ? std::optional<int64_t>(*b - *a) : std::nullopt;
  }
};

struct Relay final : c10d::Backend {
  using W = c10::intrusive_ptr<c10d::Work>;
  Relay(int rank, int size, c10::intrusive_ptr<c10d::Backend> inner) : Backend(rank, size), inner(std::move(inner)) {}
  const std::string getBackendName() const override { return "nccl"; }

  static at::Tensor cpu(const at::Tensor& t) {
    TORCH_CHECK(ours(t), "ProcessGroupNCCL: tensors must be CUDA and dense, not on ", t.device());
    TORCH_CHECK(t.is_non_overlapping_and_dense(), "Tensors must be contiguous");
    return on_cpu(t);
  }
  template <class T>
  static std::vector<T> cpu(const std::vector<T>& some) {
    std::vector<T> found;
    for (auto& one : some) found.push_back(cpu(one));
    return found;
  }
  static Tensors flat(const Lists& lists) {
    Tensors found;
    for (auto& some : lists) found.insert(found.end(), some.begin(), some.end());
    return found;
  }
  static W done(const W& work, Tensors tensors) {
    work->wait();
    return c10::make_intrusive<Done>(std::move(tensors));
  }
  // Runs a reduction; the mean, which NCCL has and gloo has not, as a sum that is divided.
  template <class Options, class Run>
  W reduced(Options options, Tensors out, Run run) {
    const bool mean = options.reduceOp == c10d::ReduceOp::AVG;
    if (mean) options.reduceOp = c10d::ReduceOp::SUM;
    auto work = done(run(options), out);
    if (mean) {
      for (auto& t : out) on_cpu(t).div_(getSize());
    }
    return work;
  }

  W broadcast(Tensors& t, const c10d::BroadcastOptions& o) override {
    auto c = cpu(t);
    return done(inner->broadcast(c, o), t);
  }
  W allreduce(Tensors& t, const c10d::AllreduceOptions& o) override {
    auto c = cpu(t);
    return reduced(o, t, [&](auto& options) { return inner->allreduce(c, options); });
  }
  W allreduce_coalesced(Tensors& t, const c10d::AllreduceCoalescedOptions& o) override {
    c10d::AllreduceOptions options;
    options.reduceOp = o.reduceOp;
    for (auto& one : t) {
      Tensors single{one};
      allreduce(single, options);
    }
    return c10::make_intrusive<Done>(t);
  }
  W reduce(Tensors& t, const c10d::ReduceOptions& o) override {
    auto c = cpu(t);
    return reduced(o, t, [&](auto& options) { return inner->reduce(c, options); });
  }
  W allgather(Lists& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    auto to = cpu(out);
    auto from = cpu(in);
    return done(inner->allgather(to, from, o), flat(out));
  }
  W _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& o) override {
    auto to = cpu(out), from = cpu(in);
    return done(inner->_allgather_base(to, from, o), {out});
  }
  W allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    for (size_t i = 0; i < out.size(); i++) _allgather_base(out[i], in[i], o);
    return c10::make_intrusive<Done>(out);
  }
  W _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& o) override {
    auto to = cpu(out), from = cpu(in);
    return reduced(o, {out}, [&](auto& options) { return inner->_reduce_scatter_base(to, from, options); });
  }
  W reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& o) override {
    for (size_t i = 0; i < out.size(); i++) _reduce_scatter_base(out[i], in[i], o);
    return c10::make_intrusive<Done>(out);
  }
  W gather(Lists& out, Tensors& in, const c10d::GatherOptions& o) override {
    auto to = cpu(out);
    auto from = cpu(in);
    return done(inner->gather(to, from, o), flat(out));
  }
  W scatter(Tensors& out, Lists& in, const c10d::ScatterOptions& o) override {
    auto to = cpu(out);
    auto from = cpu(in);
    return done(inner->scatter(to, from, o), out);
  }
  W alltoall_base(
      at::Tensor& out, at::Tensor& in, std::vector<int64_t>& a, std::vector<int64_t>& b, const c10d::AllToAllOptions& o) override {
    auto to = cpu(out), from = cpu(in);
    return done(inner->alltoall_base(to, from, a, b, o), {out});
  }
  W send(Tensors& t, int to, int tag) override {
    auto c = cpu(t);
    return done(inner->send(c, to, tag), t);
  }
  W recv(Tensors& t, int from, int tag) override {
    auto c = cpu(t);
    return done(inner->recv(c, from, tag), t);
  }
  W barrier(const c10d::BarrierOptions& o) override { return done(inner->barrier(o), {}); }

  c10::intrusive_ptr<c10d::Backend> inner;
};

}  // namespace standin

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, standin::TYPE, standin::HostTimer);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::module_::import("torch._C._distributed_c10d");
  py::class_<standin::Relay, c10d::Backend, c10::intrusive_ptr<standin::Relay>>(m, "Relay")
      .def(py::init<int, int, c10::intrusive_ptr<c10d::Backend>>());
  standin::register_memory();
  standin::put_hooks_in_place();
  m.def("touch", &standin::touch);
  m.def("touch_forks", [] {  // the driver's count of devices never raises, but forks that follow cannot use the device
    if (!standin::bad_fork()) standin::touch();
  });
  m.def("bad_fork", &standin::bad_fork);
  m.def("devices", [] { return standin::DEVICES; });
  m.def("current", [] { return int(standin::current()); });
  m.def("set_current", &standin::set_current);
  m.def("generator", &standin::generator_of);
  m.def("resize_storage", &standin::resize_storage);
  m.def("synchronize", [] {
    py::gil_scoped_release released;
    standin::wait_for_device(-1, "synchronize");
  });
  m.def("pinned_bytes", &standin::pinned_bytes);
  m.def("waits", &standin::waits);
  m.def("copies_going_on", &standin::copies_going_on);
  m.def("on_wait", [](const py::object& function) {
    if (function.is_none()) {
      standin::on_wait = nullptr;
      return;
    }
    // Never freed: at the end of the process Python may be gone before it.
    auto* held = new py::object(function);
    standin::on_wait = [held](const std::string& why) {
      py::gil_scoped_acquire acquired;
      (*held)(why);
    };
  });
}
