//! The conformance suite: every kernel of a backend against [`crate::reference`], and laws between
//! them. One suite for all backends: [`rig`] says on what it runs.

use half::bf16;
use lowp_format::{
    Axis, BufferKey, BufferSpec, Code, KernelKey, MxScale, Origin, PaddedForm, Part, Philox,
    ScaleRule, Shape, SourceRounding, Usage,
};

use crate::ingredients::{RuleKind, TABLE, traits};
use crate::{
    Backend, EncodeJob, KernelError, Slot, Source, StepScalars, Target, TensorInput, Work,
};
use rig::Rig;

mod adamw;
mod amax;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "cuda")]
mod cuda_large;
#[cfg(feature = "nccl")]
mod cuda_ranks;
#[cfg(feature = "cuda")]
mod cuda_streams;
mod decode;
mod digests;
mod encode;
mod errors;
mod fence;
mod flat;
mod forms;
mod history;
mod layout;
mod mutated;
mod observed;
mod rig;
mod step_scalars;
mod sum;
mod time;
mod values;
mod views;

// `everywhere`: for every instruction set, with one thread and with two; on the CPU. `once`: for
// the widest set and the threads of the machine. `together`: with every set at once, where the
// reference is slow.
rig::suite! {
    adamw {
        updates_equal_the_reference everywhere;
        a_thousand_steps_equal_the_reference everywhere;
        fused_equals_update_then_encode once;
        missing_scalars_are_an_error once;
        a_skipped_run_changes_nothing once;
    }
    amax {
        pieces_of_a_matrix_raise_the_amaxes_of_the_whole once;
        sums_equal_the_reference everywhere;
        large_sums_equal_the_reference once;
        large_amaxes_run everywhere;
    }
    mutated {
        amax_jobs once;
        history_jobs once;
        sum_jobs once;
        encode_jobs once;
        flat_encode_jobs once;
        decode_jobs once;
        adamw_jobs once;
        transpose_jobs once;
        repack_jobs once;
        interleave_jobs once;
        add_jobs once;
        convert_jobs once;
        step_scalars_jobs once;
        sides_and_sums_that_overflow_are_rejected once;
        what_is_stated_is_not_allocated once;
    }
    decode {
        every_ingredient_equals_the_reference everywhere;
        codes_survive_a_round_trip once;
        bf16_survives_a_round_trip once;
    }
    digests {
        outputs_are_those_of_the_snapshot everywhere;
    }
    encode {
        every_ingredient_equals_the_reference everywhere;
        stochastic_rounding_is_keyed_by_element everywhere;
        one_plan_encodes_many_tensors once;
        both_orientations_together_equal_each_alone once;
    }
    errors {
        lengths_are_checked_and_named once;
        outputs_do_not_alias once;
        sources_and_slots_may_be_shared once;
        ingredients_must_exist once;
        the_number_of_a_tensor_is_what_the_rule_keeps once;
        required_parts_are_missed once;
        columns_must_be_whole_blocks once;
        ranges_of_buffers_are_checked once;
    }
    flat {
        any_split_equals_the_whole once;
        only_owned_nibbles_change once;
    }
    forms {
        scales_are_written_in_every_form once;
        one_job_writes_several_forms once;
        forms_must_exist once;
    }
    history {
        a_history_takes_the_amax_and_gives_the_scale once;
    }
    layout {
        transposing_twice_is_the_identity once;
        forms_lead_back_to_compact once;
        interleaving_concatenates_rows once;
        large_transposes_run everywhere;
    }
    observed {
        scales_follow_from_observations once;
        a_step_in_two_passes_follows_its_masters once;
        observations_must_fit once;
        known_values_are_taken_as_they_stand once;
    }
    step_scalars {
        any_gradient_equals_the_reference once;
        thousands_of_ranks_equal_the_reference once;
        counts_go_on_from_step_to_step once;
        a_step_of_the_device_equals_that_of_the_host once;
        scalars_in_a_buffer_must_fit once;
    }
    sum {
        every_pair_of_dtypes_equals_the_reference everywhere;
        conversions_keep_every_bit_they_can everywhere;
        one_plan_adds_many_vectors once;
    }
    time {
        a_pending_read_has_the_values_of_its_point once;
        large_writes_arrive_whole once;
        streams_follow_events once;
        a_graph_does_what_was_captured once;
        a_graph_spans_streams once;
        a_capture_takes_only_work once;
    }
    views {
        a_plan_works_on_parts_of_one_memory everywhere;
        parts_that_overlap_alias once;
        views_lie_within_their_buffers once;
    }
    values {
        all_bf16_values together;
        a_million_bit_patterns together;
        every_edge_of_blocks_and_vectors together;
        every_edge_of_chunks together;
        digests_of_all_bit_patterns together;
    }
}

/// One kernel with the buffers that it may have to fill.
#[derive(Clone, Debug)]
struct Case {
    kernel: KernelKey,
    specs: Vec<BufferSpec>,
}

impl Case {
    /// Columns must be a multiple of this.
    fn columns(&self) -> usize {
        self.specs
            .iter()
            .map(BufferSpec::col_quantum)
            .max()
            .unwrap_or(1)
    }

    fn of_usage(&self, usage: Usage) -> Vec<BufferSpec> {
        let serves = |spec: &&BufferSpec| usage.contains(spec.key.usage);
        self.specs.iter().filter(serves).copied().collect()
    }
}

const ROW_MAJOR: [Axis; 2] = [Axis::Rows, Axis::Cols];
const TRANSPOSED: [Axis; 2] = [Axis::Cols, Axis::Rows];

fn entry_code(rule: ScaleRule) -> Code {
    match rule {
        ScaleRule::E8M0(_) => Code::E8M0,
        ScaleRule::TwoLevel => Code::E4M3,
        _ => Code::F32,
    }
}

/// A kernel whose columnwise buffers follow `axes`; or, with `None`, one copy for both.
fn case(
    element: Code,
    scale: ScaleRule,
    blocks: Option<[[usize; 2]; 2]>,
    axes: Option<[Axis; 2]>,
) -> Case {
    let kernel = KernelKey {
        element,
        scale,
        blocks,
    };
    let code = entry_code(scale);
    let mut specs = Vec::new();
    let sides = match axes {
        Some(axes) => vec![(Usage::ROWWISE, ROW_MAJOR, 0), (Usage::COLUMNWISE, axes, 1)],
        None => vec![(Usage::BOTH, ROW_MAJOR, 0)],
    };
    for (usage, axes, side) in sides {
        let origin = Origin::Quantized;
        specs.push(BufferSpec::data(usage, element, axes, origin));
        if let Some(blocks) = blocks {
            let (block, pad) = (blocks[side], PaddedForm::NONE);
            specs.push(BufferSpec::block_scale(
                usage, code, axes, block, pad, origin,
            ));
        }
    }
    specs.extend(match scale.tensor_part() {
        Some(Part::TensorAmax) => Some(BufferSpec::tensor_amax()),
        Some(_) => Some(BufferSpec::decode_scale()),
        None => None,
    });
    Case { kernel, specs }
}

/// The rules of a kind, with every way in which they differ.
fn rules(kind: RuleKind) -> &'static [ScaleRule] {
    match kind {
        RuleKind::Unscaled => &[ScaleRule::None],
        RuleKind::PerTensor => &[ScaleRule::Tensor],
        RuleKind::PowerOfTwo => &[
            ScaleRule::E8M0(MxScale::Te),
            ScaleRule::E8M0(MxScale::OcpFloor),
        ],
        RuleKind::TwoLevel => &[ScaleRule::TwoLevel],
        RuleKind::BlockFloat => &[
            ScaleRule::BlockF32 {
                pow2: true,
                epsilon: 0.0,
            },
            ScaleRule::BlockF32 {
                pow2: false,
                epsilon: 1e-3,
            },
        ],
    }
}

/// Every row of the table, in every order of the columnwise data that its blocks allow: one copy for
/// both orientations, transposed, and row-major; with 1-D, 2-D and unusual blocks.
fn cases() -> Vec<Case> {
    let (one_copy, transposed, row_major) = (None, Some(TRANSPOSED), Some(ROW_MAJOR));
    let mut cases = vec![];
    for (element, kind) in TABLE {
        for &rule in rules(kind) {
            if kind.entry().is_none() {
                let orders = [one_copy, transposed, row_major].into_iter();
                cases.extend(orders.map(|axes| case(element, rule, None, axes)));
                continue;
            }
            let n = match rule {
                ScaleRule::TwoLevel => 16,
                ScaleRule::BlockF32 { .. } => 128,
                _ => 32,
            };
            let (lines, square) = (Some([[1, n], [n, 1]]), Some([[n, n]; 2]));
            cases.push(case(element, rule, square, one_copy));
            cases.push(case(element, rule, square, transposed));
            cases.push(case(element, rule, lines, transposed));
            cases.push(case(element, rule, lines, row_major));
            if rule == ScaleRule::E8M0(MxScale::Te) {
                cases.push(case(element, rule, Some([[6, 8], [4, 2]]), transposed));
            }
        }
    }
    cases
}

/// Asked of `dispatch`, not of the rows: an element and a rule that have a kernel have cases, in
/// every order.
#[test]
fn every_kernel_has_cases() {
    let rules = [
        ScaleRule::None,
        ScaleRule::Tensor,
        ScaleRule::E8M0(MxScale::Te),
        ScaleRule::E8M0(MxScale::OcpFloor),
        ScaleRule::TwoLevel,
        ScaleRule::BlockF32 {
            pow2: false,
            epsilon: 1e-3,
        },
        ScaleRule::BlockF32 {
            pow2: true,
            epsilon: 0.0,
        },
    ];
    // A new rule must be written above.
    for rule in rules {
        match rule {
            ScaleRule::None | ScaleRule::Tensor | ScaleRule::TwoLevel => {}
            ScaleRule::E8M0(MxScale::Te | MxScale::OcpFloor) | ScaleRule::BlockF32 { .. } => {}
        }
    }
    let cases = cases();
    let mut kernels = 0;
    for (element, scale) in Code::ALL.into_iter().flat_map(|e| rules.map(|r| (e, r))) {
        for blocks in [None, Some([[8, 8]; 2])] {
            let key = KernelKey {
                element,
                scale,
                blocks,
            };
            if traits(&key).is_err() {
                continue;
            }
            kernels += 1;
            for axes in [None, Some(TRANSPOSED), Some(ROW_MAJOR)] {
                let covered = |case: &&Case| {
                    let columnwise = case.specs.iter().find(|s| s.key.usage == Usage::COLUMNWISE);
                    case.kernel.element == element
                        && case.kernel.scale == scale
                        && case.kernel.blocks.is_some() == blocks.is_some()
                        && columnwise.map(|spec| spec.axes) == axes
                };
                assert!(cases.iter().any(|case| covered(&case)), "{key:?} {axes:?}");
            }
        }
    }
    assert_eq!(kernels, 16);
}

/// Random cases of a law. No file remembers failing ones: the suite also runs where there are no
/// sources, and a failure names its input.
fn cases_of(count: u32) -> proptest::test_runner::Config {
    proptest::test_runner::Config {
        cases: count,
        failure_persistence: None,
        ..Default::default()
    }
}

/// Row counts around every boundary; the last is large enough for threads.
const ROWS: [usize; 9] = [0, 1, 16, 17, 33, 64, 65, 136, 200];

/// Shapes that `case` takes.
fn shapes(case: &Case) -> Vec<Shape> {
    let unit = case.columns();
    let mut shapes: Vec<Shape> = ROWS.iter().map(|&rows| Shape::new(rows, unit)).collect();
    shapes.push(Shape::new(136, 288usize.next_multiple_of(unit)));
    shapes.push(Shape::new(17, 640usize.next_multiple_of(unit)));
    shapes.push(Shape::new(3, 0));
    shapes
}

/// Values of every kind: ordinary ones, wide exponents, any bit pattern, ties, zeros, NaN and Inf.
fn values(count: usize, seed: u64, special: bool) -> Vec<f32> {
    let random = Philox::new(seed, 7);
    (0..count as u64)
        .map(|i| {
            let [kind, bits, ..] = random.block(i);
            let normal = random.normal(i);
            match kind % 32 {
                0 => normal * 2f32.powi((bits % 80).cast_signed() - 40),
                1 => (bits % 97) as f32 * 0.25 - 12.0,
                2 => {
                    if bits % 2 == 0 {
                        0.0
                    } else {
                        -0.0
                    }
                }
                3 if special && bits % 16 == 0 => f32::NAN,
                3 if special && bits % 16 == 1 => f32::NEG_INFINITY,
                3 if special && bits % 16 == 2 => f32::from_bits(bits),
                3 => f32::from_bits(bits % 0x0080_0000),
                _ => normal,
            }
        })
        .collect()
}

fn source<B: Backend>(rig: &Rig<B>, values: &[f32], half: bool) -> (Source<B>, Vec<f32>) {
    if half {
        let values: Vec<bf16> = values.iter().map(|&x| bf16::from_f32(x)).collect();
        let widened = values.iter().map(|x| x.to_f32()).collect();
        (Source::Bf16(rig.buffer(&values)), widened)
    } else {
        (Source::F32(rig.buffer(values)), values.to_vec())
    }
}

/// An encode of `source` into fresh buffers for `specs`, filled with garbage.
fn encode_job<B: Backend>(
    rig: &Rig<B>,
    kernel: KernelKey,
    specs: &[BufferSpec],
    shape: Shape,
    source: Source<B>,
    tensor: f32,
) -> EncodeJob<B> {
    let target =
        |spec: &BufferSpec| Target::new(*spec, rig.buffer(&vec![0xA5u8; spec.bytes(shape)]));
    EncodeJob {
        shape,
        kernel,
        source,
        source_rounding: SourceRounding::F32,
        tensor: Some(TensorInput::Known(Slot {
            buffer: rig.buffer(&[0.0, tensor]),
            index: 1,
        })),
        targets: specs.iter().map(target).collect(),
        stochastic: None,
    }
}

fn contents<B: Backend>(rig: &Rig<B>, targets: &[Target<B>]) -> Vec<(BufferKey, Vec<u8>)> {
    let content = |t: &Target<B>| (t.spec.key, rig.content::<u8>(&t.bytes));
    targets.iter().map(content).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    // One bit pattern for every NaN: arithmetic may choose any.
    values
        .iter()
        .map(|x| {
            if x.is_nan() {
                f32::NAN.to_bits()
            } else {
                x.to_bits()
            }
        })
        .collect()
}

fn key(usage: Usage, part: Part) -> BufferKey {
    BufferKey::new(usage, part)
}
