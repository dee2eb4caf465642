// What the GPUs of a group share, as `peers.rs` writes it; a test of `peer_layout.rs` compares the sizes.
#pragma once
#include <cstdint>

namespace lowp {

// Threads of a block.
constexpr int PEER_THREADS = 256;
// Most GPUs of a group.
constexpr int PEER_MOST = 16;
// Most items of a launch, times GPUs.
constexpr int PEER_PARTS = 2048;

// What other GPUs write for this one, and the state of its launches.
struct Mailbox {
  // Launches that ended.
  uint64_t runs;
  // Whether this one adds nothing.
  uint64_t skip;
  // The last launch for which the parts of a GPU are there, and the last in which it has read.
  uint64_t arrived[PEER_MOST], done[PEER_MOST];
  // Which items a GPU has.
  uint64_t shapes[PEER_MOST];
  // Where the part of an item begins that a GPU has: [item][GPU].
  uint64_t parts[PEER_PARTS];
};

struct PeerGroup {
  uint64_t rank, world;
  // A word of the host that is not zero once the group is stopped.
  uint64_t stop;
  uint64_t mailboxes[PEER_MOST];
};

// The sum of one gradient.
struct PeerItem {
  // Bytes from where a part begins to this GPU's elements.
  uint64_t offset;
  // Binary32, `len` values.
  uint64_t out, len;
  // Tiles of this item and those before it.
  uint64_t tiles_end;
  // Whether parts are of bfloat16, not of binary32.
  uint32_t half;
  // Whether the sum is added to what `out` holds.
  uint32_t accumulate;
};

static_assert(sizeof(Mailbox) == 16 + 24 * PEER_MOST + 8 * PEER_PARTS);
static_assert(sizeof(PeerGroup) == 24 + 8 * PEER_MOST);
static_assert(sizeof(PeerItem) == 40);

}  // namespace lowp
