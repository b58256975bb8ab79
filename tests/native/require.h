#pragma once

#include <cstdio>
#include <cstdlib>

#define REQUIRE(condition)                                    \
  do {                                                        \
    if (!(condition)) {                                       \
      std::printf("line %d: not %s\n", __LINE__, #condition); \
      std::exit(1);                                           \
    }                                                         \
  } while (0)
