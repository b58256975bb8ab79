#pragma once

#include <cstdint>

#include "core/mx.h"
#include "core/mx_shape.h"
#include "host/number.h"

namespace mok {

// T, From and To are float or BFloat16.
template <typename T>
void mx_quantize(const T* values, MxShape shape, uint8_t* elements, uint8_t* scales);

template <typename T>
void mx_dequantize(const uint8_t* elements, const uint8_t* scales, MxShape shape, T* values);

// The values as MXFP8 has them: quantised and de-quantised.
template <typename From, typename To>
void mx_round(const From* values, MxShape shape, To* rounded);

}  // namespace mok
