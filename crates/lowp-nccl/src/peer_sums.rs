//! [`PeerSums`]: sums that the rank which owns them makes, in rank order, of what it reads in the memory of all ranks.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use lowp_comm::{CommError, GradWire, ReduceItem, ReduceStaging, spanned};
use lowp_kernels::{Backend, ConvertJob, Cuda, CudaPlan, FloatDtype, KernelError, Source, Work};

use crate::peer_layout::{PARTS, TILE_BYTES};
use crate::peers::{Launch, Peers, words};
use crate::plans::run;
use crate::raw::{RankOf, Raw};
use crate::staging::Staging;

/// A planned batch.
#[derive(Debug)]
pub(crate) struct PeerSums {
    /// Gradients to the dtype in which they are read.
    convert: CudaPlan,
    launches: Vec<Launch>,
    /// What other ranks read, and where sums arrive.
    memory: Vec<[Source<Cuda>; 2]>,
}

impl PeerSums {
    /// Of `items`, as this rank has them.
    pub(crate) fn new(
        cuda: &Cuda,
        staging: &Staging,
        items: &[ReduceItem<'_, Cuda>],
        wire: GradWire,
        RankOf { rank, world }: RankOf,
    ) -> Result<Self, CommError> {
        let (mut convert, mut launches, mut memory) = (vec![], vec![], vec![]);
        let mut narrowed = 0;
        for (chunk, items) in items.chunks(PARTS / world).enumerate() {
            let (mut entries, mut own, mut tiles) = (vec![], vec![], 0);
            let mut shape = DefaultHasher::new();
            for (number, item) in items.iter().enumerate() {
                let elements = spanned(item.ranges);
                let part = &item.ranges[rank];
                let grad = item.grad.view(cuda, elements.clone())?;
                let room = ReduceStaging::read_by_peers(grad.dtype(), wire, elements.len());
                let read = match (grad, wire) {
                    (Source::F32(grad), GradWire::Bf16) => {
                        let place = narrowed..narrowed + elements.len();
                        narrowed += room.narrow;
                        let memory = staging.narrow.as_ref();
                        let narrow = Staging::view(cuda, memory, FloatDtype::Bf16, place)?;
                        convert.push(ConvertJob {
                            from: Source::F32(grad),
                            into: narrow.clone(),
                        });
                        narrow
                    }
                    (grad, _) => grad,
                };
                if !is_shareable(&read) {
                    let item = chunk * (PARTS / world) + number;
                    return Err(CommError::NotShared { item });
                }
                (item.ranges, read.dtype() == FloatDtype::Bf16).hash(&mut shape);
                let bytes = read.dtype().bytes();
                let offset = match part.is_empty() {
                    true => 0,
                    false => bytes * (part.start - elements.start),
                };
                tiles += (bytes * part.len()).div_ceil(TILE_BYTES);
                entries.extend([
                    offset as u64,
                    item.out.pointer(),
                    part.len() as u64,
                    tiles as u64,
                    u64::from(read.dtype() == FloatDtype::Bf16) | u64::from(item.accumulate) << 32,
                ]);
                own.push(read.span(cuda).start as u64);
                memory.push([read, Source::F32(item.out.clone())]);
            }
            launches.push(Launch {
                items: cuda.upload(&words(entries))?,
                own: cuda.upload(&words(own))?,
                count: items.len(),
                tiles,
                shape: shape.finish(),
            });
        }
        Ok(Self {
            convert: cuda.plan(Work::Convert(convert))?,
            launches,
            memory,
        })
    }

    pub(crate) fn convert(&self, cuda: &Cuda) -> Result<(), CommError> {
        run(cuda, &self.convert)
    }

    /// Adds, once all ranks have what is read. A graph keeps `group`, too, which stops what waits.
    pub(crate) fn add(
        &self,
        cuda: &Cuda,
        peers: &Arc<Peers>,
        group: &Arc<Raw>,
    ) -> Result<(), KernelError> {
        cuda.foreign_work(
            || (self.memory.clone(), Arc::clone(group)),
            |_| peers.launch(cuda, &self.launches),
        )
    }
}

/// Whether other GPUs can read it.
fn is_shareable(values: &Source<Cuda>) -> bool {
    match values {
        Source::F32(values) => values.is_shareable(),
        Source::Bf16(values) => values.is_shareable(),
    }
}
