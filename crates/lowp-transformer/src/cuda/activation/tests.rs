//! What activations round is what casts round of what they store. Without a GPU the test passes, unless `LOWP_REQUIRE_GPU` is set.

use std::sync::Arc;

use lowp_comm::LocalComm;
use lowp_format::{AnyRecipe, Orientation, Recipe, Role, Shape, Usage};
use lowp_fsdp::{LayerMemory, OperandEncode, OperandPlan, RecipeOperands};
use lowp_kernels::{Backend, Cuda, CudaPlan, Source, rounds_by_block};
use lowp_shard::ScaleBookBuilder;

use super::super::trace::Trace;
use super::*;

fn gpu() -> Option<Cuda> {
    match Cuda::new(0) {
        Ok(cuda) => Some(cuda),
        Err(error) if std::env::var_os("LOWP_REQUIRE_GPU").is_some() => {
            panic!("LOWP_REQUIRE_GPU is set, but {error}")
        }
        Err(_) => None,
    }
}

/// Values of many magnitudes; one in 8192 is of any bits.
fn values(cuda: &Cuda, shape: Shape, seed: u64) -> Values {
    let value = |at: usize| {
        let random = (at as u64 ^ (seed << 40)).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 20;
        let unit = (random % 4001) as f32 / 2000.0 - 1.0;
        match random % 8192 {
            0 => bf16::from_bits((random >> 13) as u16),
            _ => bf16::from_f32(unit * 2f32.powi((random >> 13) as i32 % 12 - 8)),
        }
    };
    let all: Vec<_> = (0..shape.elements()).map(value).collect();
    cuda.upload(&all).expect("values")
}

/// A cast of one operand: rows are rounded, and columns of gradients.
struct Cast {
    operands: RecipeOperands<Cuda>,
    planned: OperandEncode<Cuda>,
}

impl Cast {
    fn new(cuda: &Cuda, recipe: &AnyRecipe, role: Role, (source, shape): (&Values, Shape)) -> Self {
        let mut book = ScaleBookBuilder::default();
        let plan = OperandPlan::new(recipe, &mut book, 1, 0);
        let book = Arc::new(book.build(cuda).expect("a book"));
        let world = Arc::new(LocalComm::solo(cuda));
        let memory = LayerMemory::new(cuda);
        let operands = RecipeOperands::new(cuda, plan, book, Arc::default(), world, memory);
        let room = || Some(cuda.alloc(shape.elements()).expect("room"));
        let columns = (role == Role::Gradient).then(room).flatten();
        let planned = operands.plan_encode(
            role,
            (shape, Usage::BOTH, 0),
            (&Source::Bf16(source.clone()), [room(), columns]),
            |_| Ok(None),
        );
        let planned = planned.expect("a cast");
        Self { operands, planned }
    }

    fn job(&self) -> u64 {
        let job = self.planned.one_pass().and_then(CudaPlan::rounds_of_blocks);
        job.expect("a rounding of blocks")
    }

    /// What it made: bits of values, codes and scales.
    fn made(&self, cuda: &Cuda) -> Vec<Vec<u8>> {
        let values = Orientation::ALL.into_iter();
        let values = values.filter_map(|o| self.planned.values(o));
        let bits = |values: &Values| {
            let values = cuda.download(values).expect("values");
            values.iter().flat_map(|x| x.to_le_bytes()).collect()
        };
        let targets = [lowp_format::Part::Data, lowp_format::Part::BlockScale];
        let targets = targets
            .into_iter()
            .filter_map(|part| self.planned.target(Orientation::Columnwise, part));
        let bytes = targets.map(|target| cuda.download(&target.bytes).expect("bytes"));
        values.map(bits).chain(bytes).collect()
    }
}

/// Whether `N` matrices that `launch` makes are the same, rounded by casts and where they are made, each of them or not. `read` has
/// their shape.
fn check<const N: usize>(
    (cuda, recipe, role): (&Cuda, &AnyRecipe, Role),
    (read, shape): (&Values, Shape),
    launch: impl Fn([Made<'_>; N]) -> Done,
) {
    let room = || -> Values { cuda.alloc(shape.elements()).expect("room") };
    let stored = [(); N].map(|()| room());
    launch(stored.each_ref().map(Made::Values)).expect("values");
    for rounded in 1..1 << N {
        let is_rounded = |at: usize| rounded >> at & 1 == 1;
        let others = [(); N].map(|()| room());
        let casts = [(); N].map(|()| Cast::new(cuda, recipe, role, (read, shape)));
        let mut at = 0;
        let made = casts.each_ref().map(|cast| {
            at += 1;
            match is_rounded(at - 1) {
                true => Made::Rounded(cast.job()),
                false => Made::Values(&others[at - 1]),
            }
        });
        launch(made).expect("a launch");
        for (at, (cast, other)) in casts.iter().zip(&others).enumerate() {
            let what = format!("{recipe:?} {role:?} {shape}: {at} of {rounded:b}");
            if is_rounded(at) {
                let later = Cast::new(cuda, recipe, role, (&stored[at], shape));
                let cast_later = later.operands.run_encode(&later.planned, false);
                cast_later.expect("a cast");
                assert!(cast.made(cuda) == later.made(cuda), "{what}");
            } else {
                let bits = |values| -> Vec<u16> {
                    let values: Vec<bf16> = cuda.download(values).expect("values");
                    values.into_iter().map(bf16::to_bits).collect()
                };
                assert!(bits(other) == bits(&stored[at]), "{what}");
            }
        }
    }
}

#[test]
fn what_is_rounded_where_it_is_made_is_what_a_cast_rounds() {
    let Some(cuda) = gpu() else { return };
    let ops = Ops::new(&cuda, &Arc::new(Trace::new(&cuda))).expect("kernels");
    for recipe in AnyRecipe::all() {
        for role in [Role::Activation, Role::Gradient] {
            for (rows, cols) in [(32, 32), (64, 288), (128, 1024)] {
                let (shape, size) = (Shape::new(rows, cols), [rows, cols]);
                let kernels = recipe.operand(role).quantizers.kernels();
                if !rounds_by_block(&kernels, shape) {
                    continue;
                }
                let [x, up, dy] = [1, 2, 3].map(|seed| values(&cuda, shape, seed));
                let (of, read) = ((&cuda, &recipe, role), (&x, shape));
                check(of, read, |[y]| ops.gelu(&x, y, size));
                check(of, read, |[dx]| ops.gelu_backward(&x, &dy, dx, size));
                check(of, read, |[y]| ops.swiglu([&x, &up], y, size));
                check(of, read, |both: [Made<'_>; 2]| {
                    ops.swiglu_backward([&x, &up], &dy, both, size)
                });
            }
        }
    }
}
