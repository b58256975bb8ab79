#include "call/waves.h"

#include "sm90/move_rows.h"

namespace mok {

using namespace mok::sm90;

void launch_waves(const ForwardShape& shape, const Workspace& space, const ForwardParams& all,
                  int clusters, cudaStream_t stream, Launches& launch) {
  ForwardParams params = all;
  const auto multiply = [&](const char* what, const ItemRange* range, uint32_t* next_item) {
    params.range = range;
    params.next_item = next_item;
    launch(what, (shape.is_mx ? launch_mx_forward : launch_forward)(params, Timeline{}, clusters,
                                                                    stream));
  };
  for (int32_t index = 0; index < space.list.wave_count; ++index) {
    const Wave* const wave = space.list.waves + index;
    uint32_t* const next_items = space.next_items + 2 * index;
    const bool expands = shape.is_mx && shape.has_peers();
    launch("dispatch", (expands ? expand_rows : dispatch_rows)(params, wave, stream));
    multiply("gate and up", &wave->gate_up, next_items);
    multiply("down", &wave->down, next_items + 1);
    if (shape.directions.combine_push) {
      launch("combine", combine_rows(params, wave, stream));
    }
  }
}

}  // namespace mok
