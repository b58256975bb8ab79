#include "xla/rack_module.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "rack/simulation.h"
#include "sm90/tile.h"

namespace nb = nanobind;

namespace mok {
namespace {

using Routes = nb::ndarray<const int32_t, nb::shape<-1, -1, -1>, nb::c_contig, nb::device::cpu>;

template <typename T>
nb::object array(std::vector<T> values, std::initializer_list<size_t> shape) {
  auto owned = std::make_unique<std::vector<T>>(std::move(values));
  T* const data = owned->data();
  nb::capsule owner(owned.release(),
                    [](void* pointer) noexcept { delete static_cast<std::vector<T>*>(pointer); });
  return nb::cast(nb::ndarray<nb::numpy, T>(data, shape, owner));
}

rack::PullOrder order_of(const std::string& name) {
  if (name == "peers") {
    return rack::PullOrder::kPeers;
  }
  if (name == "rows") {
    return rack::PullOrder::kRows;
  }
  if (name == "plan") {
    return rack::PullOrder::kPlan;
  }
  throw nb::value_error("Rack.simulate: pull_order must be peers, rows or plan");
}

// Plans and work lists of all ranks of a call.
class Rack {
 public:
  Rack(Routes routes, int32_t experts, int32_t hidden, int32_t inner, int64_t ring_rows,
       int64_t chunk_rows, bool repeats_tokens)
      : sizes_{{static_cast<int32_t>(routes.shape(0)), static_cast<int64_t>(routes.shape(1)),
                static_cast<int32_t>(routes.shape(2)), experts, sm90::kTileRows, chunk_rows},
               hidden,
               inner,
               ring_rows} {
    const auto is_rows = [](int64_t rows) { return rows > 0 && rows % sm90::kTileRows == 0; };
    if (sizes_.plan.ranks < 1 || experts < 1 || experts % sizes_.plan.ranks != 0 || hidden < 1 ||
        inner < 1 || !is_rows(ring_rows) || !is_rows(chunk_rows)) {
      throw nb::value_error("Rack: inconsistent ranks, experts, widths, ring_rows or chunk_rows");
    }
    const std::span all(routes.data(), routes.size());
    nb::gil_scoped_release released;
    for (int32_t rank = 0; rank < sizes_.plan.ranks; ++rank) {
      works_.push_back(rack::work_of(sizes_, all, rank, repeats_tokens));
    }
  }

  nb::dict simulate(const std::string& pull_order, bool dispatch_push, bool combine_push,
                    double token_bytes, double output_bytes, double bin_s, int32_t sms,
                    double link_bytes_per_s, double request_share, double signal_s,
                    double pull_bytes_per_s, double pull_latency_s, double look_s, double step_s,
                    double gate_up_s, double down_s) const {
    const rack::PullOrder order = order_of(pull_order);
    const rack::Moves moves{dispatch_push, combine_push, order, token_bytes, output_bytes};
    const rack::Machine machine{
        sms,    link_bytes_per_s, request_share, signal_s, pull_bytes_per_s, pull_latency_s,
        look_s, step_s,           gate_up_s,     down_s};
    if (sms < sm90::kCluster || !(bin_s > 0) || !(link_bytes_per_s > 0) ||
        !(pull_bytes_per_s > 0)) {
      throw nb::value_error("Rack.simulate: sms, bin_s and rates of bytes must be positive");
    }
    rack::Outcome outcome;
    {
      nb::gil_scoped_release released;
      outcome = rack::simulate(sizes_, works_, machine, moves, bin_s);
    }
    const size_t ranks = works_.size();
    nb::dict figures;
    figures["push_tokens_s"] = outcome.push_tokens_s;
    figures["kernel_s"] = array(std::move(outcome.kernel_s), {ranks});
    figures["pull_rows_s"] = outcome.pull_rows_s;
    figures["tokens_s"] = array(std::move(outcome.tokens_s), {ranks});
    figures["busy_s"] = array(std::move(outcome.busy_s), {ranks});
    figures["waiting_s"] = array(std::move(outcome.waiting_s), {ranks, rack::kWaitings});
    const auto add = [&](const char* name, rack::Traffic& traffic) {
      const size_t bins = traffic.binned.size() / (ranks * ranks);
      nb::dict dict;
      dict["bytes"] = array(std::move(traffic.bytes), {ranks, ranks});
      dict["binned"] = array(std::move(traffic.binned), {bins, ranks, ranks});
      figures[name] = dict;
    };
    add("dispatch", outcome.dispatch);
    add("combine", outcome.combine);
    return figures;
  }

 private:
  rack::Sizes sizes_;
  std::vector<rack::RankWork> works_;
};

}  // namespace

void bind_rack(nb::module_& module) {
  nb::class_<Rack>(module, "Rack")
      .def(nb::init<Routes, int32_t, int32_t, int32_t, int64_t, int64_t, bool>(), nb::kw_only(),
           nb::arg("routes"), nb::arg("experts"), nb::arg("hidden"), nb::arg("inner"),
           nb::arg("ring_rows"), nb::arg("chunk_rows"), nb::arg("repeats_tokens"))
      .def("simulate", &Rack::simulate, nb::kw_only(), nb::arg("pull_order"),
           nb::arg("dispatch_push"), nb::arg("combine_push"), nb::arg("token_bytes"),
           nb::arg("output_bytes"), nb::arg("bin_s"), nb::arg("sms"), nb::arg("link_bytes_per_s"),
           nb::arg("request_share"), nb::arg("signal_s"), nb::arg("pull_bytes_per_s"),
           nb::arg("pull_latency_s"), nb::arg("look_s"), nb::arg("step_s"), nb::arg("gate_up_s"),
           nb::arg("down_s"));
}

}  // namespace mok
