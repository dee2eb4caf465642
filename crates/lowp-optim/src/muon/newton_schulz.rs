//! [`Orthogonal`]: a matrix made nearly orthogonal, as planned products (docs/numerics.md 22.3).

use half::bf16;
use lowp_format::{Shape, ShardTiles};
use lowp_gemm::{Factor, ProductJob, Products};
use lowp_kernels::{
    Backend, GradContribution, KernelError, NormalizeJob, RearrangeJob, Rearranged, Source,
    StepScalars, SumSquaresJob, Work,
};
use lowp_shard::tall_to_matrix;

use crate::{MatrixCut, OptimError};

/// Steps of the iteration.
pub(super) const STEPS: usize = 5;

/// The coefficients of a step: `a X + (b A + c A A) X` with `A = X X^T`. Source: Keller Jordan, <https://kellerjordan.github.io/posts/muon>.
const COEFFICIENTS: [f32; 3] = [3.4445, -4.7750, 2.0315];

/// Entries of the memory in which a rank works on its matrices, one after another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ScratchLens {
    /// Of a second matrix, as long as the largest.
    other: usize,
    /// Of a matrix in the order of its rows, where it is cut into shard tiles.
    in_order: usize,
    /// Of the Gram matrix of the shorter side, and of the polynomial of it.
    gram: usize,
}

impl ScratchLens {
    /// Scratch memory that is enough for the matrix of `cut`, too.
    pub(super) fn with(self, cut: &MatrixCut) -> Self {
        let Shape { rows, cols } = cut.full;
        let all = cut.full.elements();
        let in_order = if cut.reordered().is_some() { all } else { 0 };
        Self {
            other: self.other.max(all),
            in_order: self.in_order.max(in_order),
            gram: self.gram.max(rows.min(cols).pow(2)),
        }
    }

    pub(super) fn bytes(self) -> u128 {
        let entries = (self.other + self.in_order + 2 * self.gram) as u128;
        size_of::<bf16>() as u128 * entries + GradContribution::SUMS as u128
    }
}

/// Memory that matrices are worked on in, one after another.
#[derive(Debug)]
pub(super) struct Scratch<B: Backend> {
    /// A second matrix, as long as the largest.
    other: B::Buffer<bf16>,
    /// A matrix in the order of its rows, where it is cut into shard tiles.
    in_order: B::Buffer<bf16>,
    /// The Gram matrix of the shorter side, and the polynomial of it.
    grams: [B::Buffer<bf16>; 2],
    sum: B::Buffer<u8>,
}

impl<B: Backend> Scratch<B> {
    pub(super) fn new(backend: &B, lens: ScratchLens) -> Result<Self, KernelError> {
        Ok(Self {
            other: backend.alloc(lens.other)?,
            in_order: backend.alloc(lens.in_order)?,
            grams: [backend.alloc(lens.gram)?, backend.alloc(lens.gram)?],
            sum: backend.alloc(GradContribution::SUMS)?,
        })
    }

    pub(super) fn bytes(&self, backend: &B) -> usize {
        let [a, b] = &self.grams;
        let halves = [&self.other, &self.in_order, a, b];
        let entries: usize = halves
            .map(|buffer| backend.len::<bf16>(buffer))
            .iter()
            .sum();
        entries * size_of::<bf16>() + GradContribution::SUMS
    }
}

/// The work that makes one matrix orthogonal, where it lies.
#[derive(Debug)]
pub(super) struct Orthogonal<B: Backend> {
    sum: B::Buffer<u8>,
    /// From and to the order of shard tiles, where the matrix is cut into such.
    order: Option<[B::Plan; 2]>,
    squares: B::Plan,
    normalize: B::Plan,
    products: Vec<ProductJob<B>>,
}

impl<B: Backend> Orthogonal<B> {
    /// Plans the work on `values`, a matrix of `shape` that is multiplied by `scale` in the end. With `tiles` its elements are those of the tall
    /// matrix, before and after.
    pub(super) fn new(
        backend: &B,
        scratch: &Scratch<B>,
        values: &B::Buffer<bf16>,
        shape: Shape,
        scale: f32,
        tiles: Option<&ShardTiles>,
    ) -> Result<Self, OptimError> {
        let all = 0..shape.elements();
        let other = backend.view::<bf16>(&scratch.other, all.clone())?;
        let (order, matrix) = match tiles {
            None => (None, values.clone()),
            Some(tiles) => {
                let matrix = backend.view::<bf16>(&scratch.in_order, all)?;
                let runs = tall_to_matrix(tiles);
                let plan = |runs, from: &B::Buffer<bf16>, to: &B::Buffer<bf16>| {
                    let buffers = Rearranged::Bf16([from.clone(), to.clone()]);
                    let copies = vec![runs];
                    backend.plan(Work::Rearrange(vec![RearrangeJob { copies, buffers }]))
                };
                let there = plan(runs, values, &matrix)?;
                let back = plan(runs.reversed(), &matrix, values)?;
                (Some([there, back]), matrix)
            }
        };
        let squares = SumSquaresJob {
            source: Source::Bf16(matrix.clone()),
            out: scratch.sum.clone(),
        };
        let normalize = NormalizeJob {
            from: matrix.clone(),
            sum: scratch.sum.clone(),
            out: other.clone(),
        };
        // An odd number of steps ends where the matrix was.
        const { assert!(STEPS % 2 == 1) };
        let mut products = Vec::new();
        let [mut from, mut to] = [&other, &matrix];
        for step in 1..=STEPS {
            let scale = if step == STEPS { scale } else { 1.0 };
            products.extend(products_of(backend, scratch, shape, from, to, scale)?);
            (from, to) = (to, from);
        }
        Ok(Self {
            sum: scratch.sum.clone(),
            order,
            squares: backend.plan(Work::SumSquares(vec![squares]))?,
            normalize: backend.plan(Work::Normalize(vec![normalize]))?,
            products,
        })
    }

    /// Gives the work to the streams of `backend` and of `products`.
    pub(super) fn run(&self, backend: &B, products: &dyn Products<B>) -> Result<(), OptimError> {
        let none = &StepScalars::default();
        if let Some([there, _]) = &self.order {
            backend.run(there, none)?;
        }
        backend.clear(&self.sum)?;
        backend.run(&self.squares, none)?;
        backend.run(&self.normalize, none)?;
        products.backend().wait_for(backend)?;
        for product in &self.products {
            products.multiply(product)?;
        }
        backend.wait_for(products.backend())?;
        if let Some([_, back]) = &self.order {
            backend.run(back, none)?;
        }
        Ok(())
    }
}

/// One step: the Gram matrix of the shorter side, its polynomial, and the next matrix, multiplied by `scale`.
fn products_of<B: Backend>(
    backend: &B,
    scratch: &Scratch<B>,
    Shape { rows, cols }: Shape,
    from: &B::Buffer<bf16>,
    to: &B::Buffer<bf16>,
    scale: f32,
) -> Result<[ProductJob<B>; 3], KernelError> {
    let [a, b, c] = COEFFICIENTS;
    let wide = rows <= cols;
    let (short, long) = if wide { (rows, cols) } else { (cols, rows) };
    let view = |buffer| backend.view::<bf16>(buffer, 0..short * short);
    let [gram, polynomial] = [view(&scratch.grams[0])?, view(&scratch.grams[1])?];
    let x = || Factor::new(from);
    let [left, right] = if wide { [x(), x().t()] } else { [x().t(), x()] };
    let first = ProductJob {
        sizes: [short, short, long],
        left,
        right,
        alpha: 1.0,
        addend: None,
        out: gram.clone(),
    };
    let second = ProductJob {
        sizes: [short; 3],
        left: Factor::new(&gram),
        right: Factor::new(&gram),
        alpha: c,
        addend: Some((b, gram)),
        out: polynomial.clone(),
    };
    let polynomial = Factor::new(&polynomial);
    let [left, right] = if wide {
        [polynomial, x()]
    } else {
        [x(), polynomial]
    };
    let third = ProductJob {
        sizes: [rows, cols, short],
        left,
        right,
        alpha: scale,
        addend: Some((a * scale, from.clone())),
        out: to.clone(),
    };
    Ok([first, second, third])
}
