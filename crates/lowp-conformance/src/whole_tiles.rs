//! Matrices whose sides are multiples of 128 and 64, or of 32 and 256, which a device encodes in tiles without edges: of bfloat16, and of
//! binary32.

use super::*;
use lowp_kernels::StochasticKey;
use lowp_kernels::reference::RandomBytes;
use lowp_kernels::testing::is_stochastic;

/// Ten tiles of 64 columns: of 256, the last is not full.
const SHAPE: Shape = Shape {
    rows: 256,
    cols: 640,
};

/// Three rows of five tiles of 32 by 256: of 1024 columns, the last is not full.
const WIDE: Shape = Shape {
    rows: 96,
    cols: 1280,
};

/// Values, of which those of the first rows may be anything.
fn some(shape: Shape, special_rows: usize, seed: u64) -> Vec<f32> {
    let mut given = values(shape.elements(), seed, false);
    let special = values(special_rows * shape.cols, seed, true);
    given[..special.len()].copy_from_slice(&special);
    given
}

/// What each usage asks for.
fn usages(case: &Case) -> [Vec<BufferSpec>; 3] {
    let both = case.specs().into_iter().collect();
    let [rows, columns] = [Usage::ROWWISE, Usage::COLUMNWISE].map(|usage| case.of_usage(usage));
    [both, rows, columns]
}

/// Under known entries and, where scales are made of amaxes, under observed ones.
pub fn every_ingredient_equals_the_reference<B: Backend>(rig: &Rig<B>) {
    for (n, case) in rig.some_of(cases(), 5).into_iter().enumerate() {
        for shape in [SHAPE, WIDE] {
            for special_rows in [0, 1, shape.rows] {
                equals_the_reference(rig, &case, shape, true, special_rows, n as u64);
            }
        }
        // Of binary32, the tiles of the first rows have special values, and the others none; or none has any.
        for (shape, special_rows) in [(SHAPE, 1), (SHAPE, 0), (WIDE, 1)] {
            equals_the_reference(rig, &case, shape, false, special_rows, n as u64);
        }
    }
}

fn equals_the_reference<B: Backend>(
    rig: &Rig<B>,
    case: &Case,
    shape: Shape,
    half: bool,
    special_rows: usize,
    seed: u64,
) {
    let given = some(shape, special_rows, seed);
    let (source, widened) = source(rig, &given, half);
    let outer = case.outer(shape, 3.75);
    for specs in usages(case) {
        let job = encode_job(rig, case, &specs, shape, source.clone(), &outer);
        rig.run(Work::Encode(vec![job.clone()]));
        let oracle = Oracle::new(case, shape, &widened, outer.clone());
        oracle.assert(rig, &job.targets, &"known");
        if case.waits() && special_rows == 0 {
            let tensor = inputs(rig, case, &outer, observed);
            rig.run(Work::Encode(vec![EncodeJob {
                tensor,
                ..job.clone()
            }]));
            oracle.under(&outer).assert(rig, &job.targets, &"observed");
        }
    }
}

pub fn stochastic_rounding_is_keyed_by_element<B: Backend>(rig: &Rig<B>) {
    let stochastic = |case: &Case| case.kernels().iter().all(is_stochastic);
    for case in rig.some_of(cases().into_iter().filter(stochastic), 4) {
        // Elements that begin a block of the generator, and others.
        for (first, special_rows) in [(0, 0), (0, 1), (1 << 40, 0), (24, 0)] {
            let (source, widened) = source(rig, &some(SHAPE, special_rows, first), true);
            let outer = case.outer(SHAPE, 4.0);
            for specs in usages(&case) {
                let job = encode_job(rig, &case, &specs, SHAPE, source.clone(), &outer);
                let targets = job.targets.clone();
                let stochastic = Some(StochasticKey {
                    seed: 9,
                    stream: 3,
                    first,
                });
                let scalars = StepScalars {
                    random_step: 5,
                    ..StepScalars::default()
                };
                rig.run_with(
                    Work::Encode(vec![EncodeJob { stochastic, ..job }]),
                    &scalars,
                );
                let oracle = Oracle {
                    random: Some(RandomBytes {
                        philox: Philox::new(9, 3 + (5 << 32)),
                        first,
                    }),
                    ..Oracle::new(&case, SHAPE, &widened, outer.clone())
                };
                oracle.assert(rig, &targets, &"stochastic");
            }
        }
    }
}
