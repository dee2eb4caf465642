//! Muon: the momentum of a matrix, made orthogonal (docs/numerics.md 22). [`Muon`] has the matrices of a rank: what travels, and who works on
//! which.

mod costs;
mod deal;
mod newton_schulz;

use std::sync::Arc;

use half::bf16;
use lowp_comm::{Collective, Communicator, Direction, OwnedItem, digest};
use lowp_format::Shape;
use lowp_gemm::Products;
use lowp_kernels::{Backend, StateDtype};

use crate::param::Param;
use crate::{MatrixCut, OptimError};
pub use costs::MatrixCosts;
use newton_schulz::{Orthogonal, Scratch, ScratchLens};

/// Matrices of a step travel in at most so many batches: one arrives while another is worked on.
const BATCHES: usize = 4;

/// The matrices of a step, of which each is worked on by one rank.
#[derive(Debug)]
pub(crate) struct Muon<B: Backend> {
    backend: B,
    shards: Arc<dyn Communicator<B>>,
    products: Arc<dyn Products<B>>,
    batches: Vec<Vec<Matrix<B>>>,
    scratch: Scratch<B>,
    /// A number of the owners of all matrices, which ranks have in common.
    owners: u64,
}

/// A matrix that is made orthogonal, and this rank's part in that.
#[derive(Debug)]
struct Matrix<B: Backend> {
    /// The number of the matrix's parameter.
    param: usize,
    owner: usize,
    cut: Arc<MatrixCut>,
    /// What this rank has of it: first of what is made orthogonal, then of the result.
    piece: B::Buffer<bf16>,
    /// All of it, where this rank works on it; else empty.
    whole: B::Buffer<bf16>,
    /// What makes it orthogonal, if this rank does.
    work: Option<Orthogonal<B>>,
}

impl<B: Backend> Matrix<B> {
    fn item(&self) -> OwnedItem<'_, B> {
        OwnedItem {
            owner: self.owner,
            piece: &self.piece,
            whole: &self.whole,
            ranges: &self.cut.ranges,
        }
    }
}

/// A matrix whose work is planned.
#[derive(Debug)]
struct NewMatrix {
    /// The number of its parameter.
    param: usize,
    cut: Arc<MatrixCut>,
    /// What the result is multiplied by.
    scale: f32,
}

impl<B: Backend> Muon<B> {
    /// Plans the work on those of `params` whose rules are of matrices, and notes where their pieces lie.
    ///
    /// # Errors
    /// No `products`, a matrix whose cut is not known or does not fit, or a momentum in another dtype than f32.
    pub(crate) fn of(
        backend: &B,
        shards: &Arc<dyn Communicator<B>>,
        products: Option<&Arc<dyn Products<B>>>,
        params: &mut [Param<B>],
    ) -> Result<Self, OptimError> {
        let matrices = params.iter_mut().enumerate();
        let mut matrices: Vec<(usize, &mut Param<B>)> = matrices
            .filter(|(_, param)| param.rule.is_of_matrices())
            .collect();
        let (ranks, rank) = (shards.world_size(), shards.rank());
        for (_, param) in &mut matrices {
            if ranks == 1 && param.cut.is_none() {
                param.cut = Some(Arc::new(MatrixCut::whole(param.item.shape)));
            }
            if let Some(why) = flaw(param, ranks, rank) {
                return Err(OptimError::Matrix {
                    name: param.name.clone(),
                    rule: param.rule.name(),
                    why,
                });
            }
        }
        let Some(products) = products else {
            let first = matrices.first();
            return Err(OptimError::Matrix {
                name: first
                    .map(|(_, param)| param.name.clone())
                    .unwrap_or_default(),
                rule: first.map_or("", |(_, param)| param.rule.name()),
                why: "nothing multiplies matrices; give products to the builder".to_owned(),
            });
        };
        let planned = matrices.iter().filter_map(|(number, param)| {
            let cut = param.cut.as_ref()?;
            let Shape { rows, cols } = cut.full;
            Some(NewMatrix {
                param: *number,
                cut: Arc::clone(cut),
                scale: param.rule.matrix_scale(rows, cols),
            })
        });
        let planned: Vec<NewMatrix> = planned.collect();
        let (muon, pieces) = Self::new(backend, shards, products, planned)?;
        for ((_, param), piece) in matrices.into_iter().zip(pieces) {
            param.piece = Some(piece);
        }
        Ok(muon)
    }

    /// Plans the work of this rank on `matrices`, whose pieces the ranks of `shards` have. Returns also where this rank's pieces lie, in the
    /// order of the matrices.
    fn new(
        backend: &B,
        shards: &Arc<dyn Communicator<B>>,
        products: &Arc<dyn Products<B>>,
        matrices: Vec<NewMatrix>,
    ) -> Result<(Self, Vec<B::Buffer<bf16>>), OptimError> {
        let rank = shards.rank();
        let shapes = matrices.iter().map(|matrix| matrix.cut.full);
        let owners = costs::owners(shapes, shards.world_size());
        let own = matrices.iter().zip(&owners);
        let own = own.filter(|(_, owner)| **owner == rank);
        let lens = own.fold(ScratchLens::default(), |lens, (matrix, _)| {
            lens.with(&matrix.cut)
        });
        let scratch = Scratch::new(backend, lens)?;
        let mut batches: Vec<Vec<Matrix<B>>> = Vec::new();
        let mut pieces = Vec::new();
        let numbers = deal::batches(&owners, BATCHES);
        let all_owners = digest(owners.iter().map(|&owner| owner as u64));
        for ((matrix, owner), batch) in matrices.into_iter().zip(owners).zip(numbers) {
            let NewMatrix { param, cut, scale } = matrix;
            let Shape { rows, cols } = cut.full;
            let own = cut.ranges[rank].clone();
            let (whole, piece, work) = match owner == rank {
                false => (backend.alloc(0)?, backend.alloc(own.len())?, None),
                true => {
                    let whole = backend.alloc::<bf16>(rows * cols)?;
                    let piece = match cut.lies_in_place(rank) {
                        true => backend.view::<bf16>(&whole, own)?,
                        false => backend.alloc(own.len())?,
                    };
                    let tiles = cut.reordered();
                    let work = match rows * cols {
                        0 => None,
                        _ => Some(Orthogonal::new(
                            backend, &scratch, &whole, cut.full, scale, tiles,
                        )?),
                    };
                    (whole, piece, work)
                }
            };
            pieces.push(piece.clone());
            batches.resize_with(batches.len().max(batch + 1), Vec::new);
            batches[batch].push(Matrix {
                param,
                owner,
                cut,
                piece,
                whole,
                work,
            });
        }
        batches.retain(|batch| !batch.is_empty());
        let muon = Self {
            backend: backend.clone(),
            shards: Arc::clone(shards),
            products: Arc::clone(products),
            batches,
            scratch,
            owners: all_owners,
        };
        Ok((muon, pieces))
    }

    /// Gives the work of a step on the matrices of parameters that are `present` to the streams: pieces hold what is made orthogonal before, and
    /// the results after. The same are present on all ranks.
    pub(crate) fn run(&self, present: &[bool]) -> Result<(), OptimError> {
        let begun = self.backend.record()?;
        let batches = self.batches.iter().map(|batch| {
            let batch = batch.iter().filter(|matrix| present[matrix.param]);
            batch.collect::<Vec<_>>()
        });
        let batches: Vec<_> = batches.filter(|batch| !batch.is_empty()).collect();
        let mut arriving = Vec::new();
        for batch in &batches {
            arriving.push(self.start(&begun, batch, Direction::ToOwners)?);
        }
        let mut leaving = Vec::new();
        for (batch, arrived) in batches.iter().zip(arriving) {
            if let Some(arrived) = arrived {
                arrived.wait(&self.backend)?;
            }
            for work in batch.iter().filter_map(|matrix| matrix.work.as_ref()) {
                work.run(&self.backend, &*self.products)?;
            }
            let done = self.backend.record()?;
            leaving.push(self.start(&done, batch, Direction::FromOwners)?);
        }
        for left in leaving.into_iter().flatten() {
            left.wait(&self.backend)?;
        }
        Ok(())
    }

    /// Starts to move a batch after `event`; the pieces of one rank are where they belong.
    fn start(
        &self,
        event: &B::Event,
        batch: &[&Matrix<B>],
        direction: Direction,
    ) -> Result<Option<lowp_comm::Started<B>>, OptimError> {
        if self.shards.world_size() == 1 {
            return Ok(None);
        }
        let items: Vec<OwnedItem<'_, B>> = batch.iter().map(|matrix| matrix.item()).collect();
        let batch = Collective::Owned(&items, direction);
        Ok(Some(self.shards.start(event, "matrices of Muon", batch)?))
    }

    /// A number that ranks have in common if the same ranks work on the same matrices.
    pub(crate) fn owners(&self) -> u64 {
        self.owners
    }

    /// Bytes of pieces, matrices and scratch memory of this rank, and of what products work in.
    pub(crate) fn bytes(&self) -> usize {
        let rank = self.shards.rank();
        let len = |buffer: &B::Buffer<bf16>| self.backend.len::<bf16>(buffer);
        let of = |matrix: &Matrix<B>| {
            let in_whole = matrix.owner == rank && matrix.cut.lies_in_place(rank);
            let piece = if in_whole { 0 } else { len(&matrix.piece) };
            len(&matrix.whole) + piece
        };
        let entries: usize = self.batches.iter().flatten().map(of).sum();
        let work = self.scratch.bytes(&self.backend) + self.products.workspace_bytes();
        entries * size_of::<bf16>() + work
    }
}

/// Why a parameter cannot be made orthogonal by `rank` of `ranks` ranks.
fn flaw<B: Backend>(param: &Param<B>, ranks: usize, rank: usize) -> Option<String> {
    if param
        .states
        .iter()
        .any(|state| state.dtype() != StateDtype::F32)
    {
        return Some("its momentum is not f32; keep momentum_buffer in f32".to_owned());
    }
    match &param.cut {
        None => Some(format!(
            "{ranks} ranks share it; say which elements each has (OptimizerBuilder::matrix)"
        )),
        Some(cut) => cut.flaw(ranks, rank, param.len),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use lowp_comm::LocalComm;
    use lowp_gemm::CpuProducts;
    use lowp_kernels::Cpu;

    /// Wherever a cut is, the piece of an owner lies in its place of the whole at a multiple of 16 bytes, or apart from it.
    #[test]
    fn pieces_begin_where_kernels_are_fast() {
        let full = Shape::new(4, 12);
        let products: Arc<dyn Products<Cpu>> = Arc::new(CpuProducts { threads: 1 });
        let mut apart = 0;
        for at in 0..=full.elements() {
            let cut = Arc::new(MatrixCut {
                full,
                ranges: vec![0..at, at..full.elements()],
                tiles: None,
            });
            for comm in LocalComm::world(&Cpu, 2, Duration::from_secs(60)) {
                let comm: Arc<dyn Communicator<Cpu>> = Arc::new(comm);
                let matrix = |param| NewMatrix {
                    param,
                    cut: Arc::clone(&cut),
                    scale: 1.0,
                };
                let matrices = vec![matrix(0), matrix(1)];
                let (muon, _) = Muon::new(&Cpu, &comm, &products, matrices).expect("room");
                let own = muon.batches.iter().flatten();
                let own: Vec<_> = own.filter(|matrix| matrix.work.is_some()).collect();
                assert_eq!(own.len(), 1);
                let [whole, piece] = [&own[0].whole, &own[0].piece].map(|of| Cpu.span::<bf16>(of));
                assert_eq!(
                    piece.len(),
                    size_of::<bf16>() * cut.ranges[comm.rank()].len()
                );
                match whole.contains(&piece.start) && piece.end <= whole.end {
                    true => assert!((piece.start - whole.start).is_multiple_of(16), "{at}"),
                    false if piece.is_empty() => {}
                    false => apart += 1,
                }
            }
        }
        // Of the second rank, but for one place in eight and for the end.
        assert_eq!(apart, 48 - 48 / 8);
    }
}
