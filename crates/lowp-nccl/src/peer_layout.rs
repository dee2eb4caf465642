//! Sizes that `peers.rs` and `peer_sums.rs` have in common with `cuda/include/peers.cuh` and `cuda/sum_peers.cu`.

use lowp_comm::MAX_PEER_GPUS;

/// Threads of a block.
pub(crate) const THREADS: usize = 256;

/// Rows of 16 bytes that a thread has of a tile.
const ROWS: usize = 4;

/// Bytes of a part in a tile.
pub(crate) const TILE_BYTES: usize = THREADS * ROWS * 16;

/// Most items of a launch, times GPUs.
pub(crate) const PARTS: usize = 2048;

/// Bytes of `Mailbox`.
pub(crate) const MAILBOX: usize = 16 + 24 * MAX_PEER_GPUS + 8 * PARTS;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_kernels() {
        let kernels = [
            include_str!("../cuda/include/peers.cuh"),
            include_str!("../cuda/sum_peers.cu"),
        ];
        let kernels = kernels.concat();
        for (name, value) in [
            ("PEER_THREADS", THREADS),
            ("ROWS", ROWS),
            ("PEER_PARTS", PARTS),
            ("PEER_MOST", MAX_PEER_GPUS),
        ] {
            let line = format!("constexpr int {name} = {value};");
            assert!(kernels.contains(&line), "{line}");
        }
        assert!(kernels.contains("sizeof(Mailbox) == 16 + 24 * PEER_MOST + 8 * PEER_PARTS"));
        assert_eq!((MAILBOX, TILE_BYTES), (16_784, 16_384));
    }
}
