//! What activations do of a cast is what the cast does of what they store. Without a GPU the test passes, unless `LOWP_REQUIRE_GPU` is set.

use std::sync::Arc;

use lowp_comm::LocalComm;
use lowp_format::{AnyRecipe, Orientation, Part, Recipe, Role, Shape, Usage};
use lowp_fsdp::{LayerMemory, OperandEncode, OperandPart, OperandPlan, RecipeOperands};
use lowp_kernels::{Backend, Cuda, CudaPlan, Source, Target, rounds, rounds_by_block};
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

/// A cast of one operand.
struct Cast {
    operands: RecipeOperands<Cuda>,
    planned: OperandEncode<Cuda>,
}

impl Cast {
    /// Rows are rounded, and columns of gradients, where the recipe has them rounded.
    fn new(cuda: &Cuda, recipe: &AnyRecipe, role: Role, (source, shape): (&Values, Shape)) -> Self {
        let known = rounds(&recipe.operand(role).quantizers.kernels(), shape);
        let rounded = [known, known && role == Role::Gradient];
        Self::planned(cuda, recipe, (role, Usage::BOTH), rounded, (source, shape))
    }

    /// Columns of an input alone, rounded.
    fn of_columns(cuda: &Cuda, recipe: &AnyRecipe, source: (&Values, Shape)) -> Self {
        let of = (Role::Activation, Usage::COLUMNWISE);
        Self::planned(cuda, recipe, of, [false, true], source)
    }

    fn planned(
        cuda: &Cuda,
        recipe: &AnyRecipe,
        (role, usage): (Role, Usage),
        rounded: [bool; 2],
        (source, shape): (&Values, Shape),
    ) -> Self {
        let mut book = ScaleBookBuilder::default();
        let plan = OperandPlan::new(recipe, &mut book, 1, 0);
        let book = Arc::new(book.build(cuda).expect("a book"));
        let world = Arc::new(LocalComm::solo(cuda));
        let memory = LayerMemory::new(cuda);
        let operands = RecipeOperands::new(cuda, plan, book, Arc::default(), world, memory);
        let values = rounded.map(|rounded| {
            let room = || cuda.alloc(shape.elements()).expect("room");
            rounded.then(room)
        });
        let source = Source::Bf16(source.clone());
        let part = OperandPart {
            shape,
            usage,
            first_token: 0,
        };
        let planned = operands.plan_encode(role, part, &source, values, |_| Ok(None));
        let planned = planned.expect("a cast");
        Self { operands, planned }
    }

    /// What an activation does of it, which stores `values` where it does not round them.
    fn made<'a>(&self, values: &'a Values) -> Made<'a> {
        let round = self.planned.one_pass().and_then(CudaPlan::rounds_of_blocks);
        let amax = self.planned.amax().and_then(CudaPlan::amaxes_of_matrix);
        match (round, amax) {
            (Some(job), _) => Made::Rounded(job),
            (None, Some(job)) => Made::Observed(values, job),
            (None, None) => Made::Values(values),
        }
    }

    /// What it made: bits of values, codes and scales.
    fn contents(&self, cuda: &Cuda) -> Vec<Vec<u8>> {
        let values = Orientation::ALL.into_iter();
        let values = values.filter_map(|o| self.planned.values(o));
        let values = values.map(|values| bits(cuda, values));
        let parts = Orientation::ALL.into_iter().flat_map(|o| {
            let parts = [Part::Data, Part::BlockScale, Part::DecodeScale, Part::Amax];
            parts.map(|part| self.planned.target(o, part))
        });
        let bytes = |target: &Target<Cuda>| cuda.download(&target.bytes).expect("bytes");
        values.chain(parts.flatten().map(bytes)).collect()
    }
}

fn bits(cuda: &Cuda, values: &Values) -> Vec<u8> {
    let values = cuda.download(values).expect("values");
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// Whether `N` matrices that `launch` makes are the same, cast afterwards and where they are made, each of them or not. `read` has their
/// shape. Nothing is checked where activations do nothing of a cast.
fn check<const N: usize>(
    (cuda, recipe, role): (&Cuda, &AnyRecipe, Role),
    (read, shape): (&Values, Shape),
    launch: impl Fn([Made<'_>; N]) -> Done,
) {
    let room = || -> Values { cuda.alloc(shape.elements()).expect("room") };
    let stored = [(); N].map(|()| room());
    launch(stored.each_ref().map(Made::Values)).expect("values");
    for which in 1..1 << N {
        let others = [(); N].map(|()| room());
        let casts = others.each_ref().map(|other| {
            let cast = Cast::new(cuda, recipe, role, (other, shape));
            match cast.made(other) {
                // Nothing is read of the source.
                Made::Rounded(_) => Cast::new(cuda, recipe, role, (read, shape)),
                _ => cast,
            }
        });
        let is_cast = |at: usize| which >> at & 1 == 1;
        let mut each = casts.iter().zip(&others).enumerate();
        let made = [(); N].map(|()| match each.next() {
            Some((at, (cast, other))) if is_cast(at) => cast.made(other),
            Some((_, (_, other))) => Made::Values(other),
            None => unreachable!("as many"),
        });
        launch(made).expect("a launch");
        for (at, (cast, other)) in casts.iter().zip(&others).enumerate() {
            let what = format!("{recipe:?} {role:?} {shape}: {at} of {which:b}");
            let rounded = matches!(made[at], Made::Rounded(_));
            if !rounded {
                assert!(bits(cuda, other) == bits(cuda, &stored[at]), "{what}");
            }
            if matches!(made[at], Made::Values(_)) {
                continue;
            }
            if !rounded {
                let done = cast.operands.run_observed(&cast.planned, false);
                done.expect("a cast");
            }
            let later = Cast::new(cuda, recipe, role, (&stored[at], shape));
            let done = later.operands.run_encode(&later.planned, false);
            done.expect("a cast");
            assert!(cast.contents(cuda) == later.contents(cuda), "{what}");
        }
    }
}

#[test]
fn what_is_cast_where_it_is_made_is_what_a_cast_makes() {
    let Some(cuda) = gpu() else { return };
    let ops = Ops::new(&cuda, &Arc::new(Trace::new(&cuda))).expect("kernels");
    for recipe in AnyRecipe::low_precision() {
        for role in [Role::Activation, Role::Gradient] {
            // Whole tiles, and sides that end within one.
            for (rows, cols) in [(32, 32), (64, 288), (128, 1024)] {
                let (shape, size) = (Shape::new(rows, cols), [rows, cols]);
                let [x, up, dy] = [1, 2, 3].map(|seed| values(&cuda, shape, seed));
                let (of, read) = ((&cuda, &recipe, role), (&x, shape));
                check(of, read, |[y]| ops.gelu(&x, y, size));
                check(of, read, |[dx]| ops.gelu_backward(&x, &dy, dx, None, size));
                check(of, read, |[y]| ops.swiglu(&x, &up, y, size));
                check(of, read, |both: [Made<'_>; 2]| {
                    ops.swiglu_backward(&x, &up, &dy, both, None, size)
                });
            }
        }
    }
}

/// Columns that backward rounds are those of a cast of what forward stored.
#[test]
fn what_backward_makes_again_is_what_forward_made() {
    let Some(cuda) = gpu() else { return };
    let ops = Ops::new(&cuda, &Arc::new(Trace::new(&cuda))).expect("kernels");
    for recipe in AnyRecipe::low_precision() {
        for (rows, cols) in [(32, 32), (64, 288), (128, 1024)] {
            let (shape, size) = (Shape::new(rows, cols), [rows, cols]);
            let kernels = recipe.operand(Role::Activation).quantizers.kernels();
            if !rounds_by_block(&kernels, shape) {
                continue;
            }
            let [x, up, dy] = [4, 5, 6].map(|seed| values(&cuda, shape, seed));
            let room = || -> Values { cuda.alloc(shape.elements()).expect("room") };
            let check = |forward: &dyn Fn(Made<'_>) -> Done, backward: &dyn Fn(u64) -> Done| {
                let stored = room();
                forward(Made::Values(&stored)).expect("values");
                let later = Cast::of_columns(&cuda, &recipe, (&stored, shape));
                let done = later.operands.run_encode(&later.planned, false);
                done.expect("a cast");
                let cast = Cast::of_columns(&cuda, &recipe, (&x, shape));
                let job = cast.planned.one_pass().and_then(CudaPlan::rounds_of_blocks);
                backward(job.expect("a rounding of blocks")).expect("a launch");
                let found = cast.contents(&cuda);
                assert!(found == later.contents(&cuda), "{recipe:?} {shape}");
            };
            let [dx, dup] = [room(), room()];
            check(&|y| ops.gelu(&x, y, size), &|y| {
                ops.gelu_backward(&x, &dy, Made::Values(&dx), Some(y), size)
            });
            let made = [&dx, &dup].map(Made::Values);
            check(&|y| ops.swiglu(&x, &up, y, size), &|y| {
                ops.swiglu_backward(&x, &up, &dy, made, Some(y), size)
            });
        }
    }
}
