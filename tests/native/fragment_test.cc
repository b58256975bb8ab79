// Which values a thread rounds to MXFP8 together: with those of its quad a block of 32 columns of a
// row, each value once; against the layout of a warpgroup's accumulators as PTX has it.
#include "sm90/fragment.h"

#include <set>

#include "require.h"

using namespace mok;
using namespace mok::sm90;

namespace {

struct Place {
  int row;
  int column;

  bool operator<(const Place& other) const {
    return row != other.row ? row < other.row : column < other.column;
  }
};

// wgmma.m64nNk16, fragment D: of a thread's i-th value in a panel, within the warp's 16 rows.
Place place_of(int lane, int i) {
  return {lane / 4 + i / 2 % 2 * 8, i / 4 * 8 + lane % 4 * 2 + i % 2};
}

void check_block(int quad, int block, int half) {
  std::set<Place> places;
  for (int lane = quad * 4; lane < quad * 4 + 4; ++lane) {
    for (int value = 0; value < kBlockValues; ++value) {
      const BlockWord word = block_word(half, value / 2 * 2);
      REQUIRE(word.group < kBlockGroups && word.index < kGroupWords);
      places.insert(place_of(lane, word_of_panel(block, word) * 2 + value % 2));
    }
  }
  REQUIRE(places.size() == kMxBlock);
  REQUIRE(places.begin()->row == quad + half * 8 && places.rbegin()->row == quad + half * 8);
  REQUIRE(places.begin()->column == block * kMxBlock);
  REQUIRE(places.rbegin()->column == (block + 1) * kMxBlock - 1);
}

}  // namespace

int main() {
  for (int quad = 0; quad < 8; ++quad) {
    for (int block = 0; block < kPanelBlocks; ++block) {
      for (int half = 0; half < kHalves; ++half) check_block(quad, block, half);
    }
  }
}
