//! [`NcclOptions`]: how ranks work together.

use std::time::Duration;

/// Who adds gradients, and in which order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Sums {
    /// The rank that owns a sum, in rank order, which reads the parts in the memory of all ranks: the bits of every other engine and of the
    /// CPU, without memory for parts. Sums over replicas are NCCL's still. It needs ranks that are threads of one process, on up to 16 GPUs that reach each
    /// other's memory (NVLink, or PCIe where the driver has it), and gradients in memory of [`Backend::alloc`](lowp_kernels::Backend::alloc). Elsewhere as
    /// [`Sums::Nccl`].
    #[default]
    Peers,
    /// NCCL, in an order of its own; sums that are added to earlier ones, as those of a second micro-batch, take scratch memory. They are
    /// equal from run to run of one world on the same machines with the same settings, and not equal to the sums of another world. The
    /// fastest across machines. Gradients that travel in bfloat16 are added as [`Sums::RankOrder`] says.
    Nccl,
    /// The rank that receives a sum, in rank order: the bits of every other engine and of the CPU. As many bytes travel; between
    /// machines each rank fetches its parts by itself, and memory for the parts of all ranks is needed.
    RankOrder,
}

/// How ranks work together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NcclOptions {
    /// A batch that is not done this time after the one before has failed. 300 seconds.
    pub limit: Duration,
    /// Who adds gradients.
    pub sums: Sums,
    /// The least number of thread blocks that NCCL moves data with; 0 leaves it to NCCL. More of them move data faster, and
    /// leave less of the GPU to work beside them. 32: between two H200, 1.1 to 1.2 times as fast as what NCCL chooses by itself.
    pub min_ctas: u32,
}

impl Default for NcclOptions {
    fn default() -> Self {
        Self {
            limit: Duration::from_secs(300),
            sums: Sums::default(),
            min_ctas: 32,
        }
    }
}
