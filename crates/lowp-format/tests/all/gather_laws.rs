//! Gather plans: their laws over every recipe, their errors, and what each recipe promises to send.

use std::ops::Range;

use lowp_format::{
    AnyRecipe, BufferSpec, FormatError, GatherPlan, GatherStep, Origin, Phase, PhasePlans,
    PieceLayout, Recipe, RecipeOptions, ReshardAfterForward, RowCuts, Shape, Usage,
};
use proptest::prelude::*;

const USAGES: [Usage; 3] = [Usage::ROWWISE, Usage::COLUMNWISE, Usage::BOTH];

/// A recipe with a shape of multiples of its blocks in columns, and of anything in rows.
fn tensors() -> impl Strategy<Value = (AnyRecipe, Shape)> {
    let recipes = proptest::sample::select(AnyRecipe::all());
    (recipes, 0..400usize, 1..8usize).prop_map(|(recipe, rows, blocks)| {
        let fits = |cols: &usize| recipe.check(Shape::new(rows, *cols)).is_ok();
        let cols = (1..).find(fits).expect("some width");
        (recipe, Shape::new(rows, blocks * cols))
    })
}

/// The buffers that travel, in order.
fn gathered(plan: &GatherPlan) -> Vec<String> {
    let concat = plan
        .steps
        .iter()
        .filter(|step| matches!(step, GatherStep::Concat { .. }));
    concat.map(|step| step.spec().key.to_string()).collect()
}

/// The buffers that are derived, in order.
fn derived(plan: &GatherPlan) -> Vec<String> {
    let derive = plan
        .steps
        .iter()
        .filter(|step| matches!(step, GatherStep::Derive { .. }));
    derive.map(|step| step.spec().key.to_string()).collect()
}

/// Where rank `rank`'s piece begins, from the layout of the full buffer.
fn piece_start(spec: &BufferSpec, full: Shape, cuts: &RowCuts, rank: usize) -> usize {
    spec.bytes(full.with_rows(cuts.range(rank).start))
}

proptest! {
    #[test]
    fn pieces_make_up_the_full_buffer((recipe, full) in tensors(), world in 1..10usize, usage in 0..3usize) {
        let plan = GatherPlan::new(&recipe, full, world, USAGES[usage]).unwrap();
        for step in &plan.steps {
            if let GatherStep::Concat { spec, layout, pieces, .. } = step {
                prop_assert_eq!(spec.origin, Origin::Quantized);
                prop_assert_eq!(pieces.len(), world);
                prop_assert_eq!(step.wire_bytes(), spec.bytes(full));
                prop_assert_eq!(step.piece_ranges().len(), world);
                for (rank, range) in step.piece_ranges().into_iter().enumerate() {
                    prop_assert_eq!(range.len(), pieces[rank]);
                    prop_assert_eq!(range.start, piece_start(spec, full, &plan.cuts, rank));
                }
                if *layout == PieceLayout::Interleave {
                    // One row of the result is the ranks' rows side by side.
                    let rows = plan.cuts.ranges().map(|r| spec.row_bytes(full.with_rows(r.len())));
                    prop_assert_eq!(rows.sum::<usize>(), spec.row_bytes(full));
                }
            } else {
                prop_assert_eq!(step.wire_bytes(), 0);
                prop_assert!(step.piece_ranges().is_empty());
            }
        }
    }

    #[test]
    fn a_plan_fills_what_the_usage_needs((recipe, full) in tensors(), world in 1..10usize, usage in 0..3usize) {
        let usage = USAGES[usage];
        let plan = GatherPlan::new(&recipe, full, world, usage).unwrap();
        let mut filled: Vec<_> = plan.kept().map(|spec| spec.key).collect();
        let mut needed: Vec<_> = recipe.buffers(usage).iter().map(|spec| spec.key).collect();
        filled.sort();
        needed.sort();
        prop_assert_eq!(filled, needed);
        sources_come_first(&plan.steps.iter().collect::<Vec<_>>())?;
    }

    #[test]
    fn a_step_has_both_operands_under_either_policy((recipe, full) in tensors(), world in 1..10usize) {
        let cuts = RowCuts::new(full.rows, world, recipe.row_quantum(Usage::BOTH)).unwrap();
        let again = PhasePlans::new(&recipe, full, &cuts, true).unwrap();
        let once = PhasePlans::new(&recipe, full, &cuts, false).unwrap();
        for phase in Phase::ALL {
            let fresh = again.phase(phase);
            sources_come_first(&fresh.steps.iter().collect::<Vec<_>>())?;
            for spec in recipe.buffers(phase.usage()) {
                prop_assert!(fresh.kept().any(|kept| kept.key == spec.key), "{}", spec.key);
            }
        }
        for plans in [&again, &once] {
            let phases = Phase::ALL.map(|phase| plans.phase(phase).wire_bytes());
            prop_assert_eq!(plans.wire_bytes(), phases[0] + phases[1]);
        }
        // Gathered once, backward sends nothing and completes what forward kept.
        prop_assert_eq!(once.backward.wire_bytes(), 0);
        prop_assert!(once.wire_bytes() <= again.wire_bytes());
        let steps: Vec<_> = once.forward.steps.iter().chain(&once.backward.steps).collect();
        sources_come_first(&steps)?;
        for spec in recipe.buffers(Usage::BOTH) {
            let filled = steps.iter().filter(|step| step.spec().key == spec.key).count();
            prop_assert_eq!(filled, 1, "{} is filled exactly once", spec.key);
        }
    }
}

/// A derivation reads a buffer that an earlier step of the same tensor filled.
fn sources_come_first(steps: &[&GatherStep]) -> Result<(), TestCaseError> {
    for (at, step) in steps.iter().enumerate() {
        if let GatherStep::Derive { from, .. } = step {
            prop_assert!(
                steps[..at]
                    .iter()
                    .any(|earlier| earlier.spec().key == *from)
            );
        }
    }
    Ok(())
}

#[test]
fn cuts_off_the_quantum_are_rejected() {
    let full = Shape::new(384, 64);
    let mut rejected = 0;
    for recipe in AnyRecipe::all() {
        for usage in USAGES {
            let quantum = recipe.row_quantum(usage);
            let ranges: [Range<usize>; 3] = [0..128, 128..129, 129..384];
            let cuts = RowCuts::from_ranges(&ranges).unwrap();
            let plan = GatherPlan::with_cuts(&recipe, full, &cuts, usage, usage, &[]);
            if quantum == 1 {
                assert!(plan.is_ok(), "{} {usage}", recipe.name());
                continue;
            }
            let expected = FormatError::OffQuantum {
                recipe: recipe.name(),
                usage,
                rows: 384,
                world: 3,
                quantum,
                rank: 2,
                start: 129,
            };
            assert_eq!(plan, Err(expected.clone()));
            let text = expected.to_string();
            let says = format!(
                "{} {usage} needs cuts at multiples of {quantum}",
                recipe.name()
            );
            assert!(
                text.starts_with("384 rows over 3 ranks: ") && text.contains(&says),
                "{text}"
            );
            rejected += 1;
        }
    }
    assert!(rejected > 0);
}

#[test]
fn a_cut_after_all_rows_is_legal() {
    // 388 rows are off every quantum; ranks after the last row hold nothing to be cut.
    let cuts = RowCuts::from_ranges(&[0..384, 384..388, 388..388]).unwrap();
    for recipe in AnyRecipe::all() {
        PhasePlans::new(&recipe, Shape::new(388, 64), &cuts, true).unwrap();
    }
}

#[test]
fn parts_are_of_what_forward_gathered_and_each_group_has_all_of_them() {
    for recipe in AnyRecipe::all() {
        for (rows, world) in [(0, 4), (17, 4), (136, 6), (200, 8), (96, 9)] {
            let full = Shape::new(rows, 64);
            let cuts = RowCuts::new(rows, world, recipe.row_quantum(Usage::BOTH)).unwrap();
            let once = PhasePlans::new(&recipe, full, &cuts, false).unwrap();
            let again = PhasePlans::new(&recipe, full, &cuts, true).unwrap();
            assert_eq!((&once.parts, &again.parts), (&None, &None));
            for ranks in (2..world).filter(|n| world % n == 0) {
                let policy = ReshardAfterForward::Group(ranks);
                let plans = PhasePlans::new(&recipe, full, &cuts, policy).unwrap();
                assert_eq!(
                    (&plans.forward, &plans.backward),
                    (&once.forward, &again.backward)
                );
                let parts = plans.parts.as_ref().expect("parts");
                assert_eq!(plans.phase(Phase::Backward), parts);
                assert_eq!(derived(parts), derived(&again.backward));
                let sent = world / ranks * again.backward.wire_bytes();
                assert_eq!(parts.wire_bytes(), sent);
                assert_eq!(plans.wire_bytes(), once.forward.wire_bytes() + sent);
                for step in &parts.steps {
                    let GatherStep::Concat { spec, pieces, .. } = step else {
                        continue;
                    };
                    let there = plans.forward.steps.iter().any(|s| s.spec() == spec);
                    assert!(there, "{}: {} was not gathered", recipe.name(), spec.key);
                    for group in pieces.chunks(ranks) {
                        assert_eq!(group.iter().sum::<usize>(), spec.bytes(full));
                        let spread = group.iter().max().unwrap() - group[0];
                        assert_eq!(spread, 0, "the first is the largest");
                    }
                }
            }
        }
    }
}

#[test]
fn policies_are_written_as_they_are_read() {
    for text in ["true", "false", "1", "8", "1024"] {
        let policy: ReshardAfterForward = text.parse().unwrap();
        assert_eq!(policy.to_string(), text);
    }
    for text in [
        "",
        "0",
        "-1",
        "yes",
        "True",
        "2.0",
        "99999999999999999999999",
    ] {
        let error = text.parse::<ReshardAfterForward>().unwrap_err();
        assert!(
            error
                .to_string()
                .contains("true, false, or a number of ranks"),
            "{error}"
        );
    }
    assert_eq!(ReshardAfterForward::from(true), ReshardAfterForward::Yes);
    assert_eq!(ReshardAfterForward::from(false), ReshardAfterForward::No);
}

#[test]
fn wrong_shapes_worlds_and_cuts_are_rejected() {
    for recipe in AnyRecipe::all() {
        let fits = |cols: &usize| recipe.check(Shape::new(64, *cols)).is_ok();
        let multiple = (1..).find(fits).expect("some width");
        let full = Shape::new(64, 2 * multiple);
        let empty = GatherPlan::new(&recipe, full, 0, Usage::BOTH);
        assert_eq!(empty, Err(FormatError::EmptyWorld));

        let cuts = RowCuts::new(96, 2, 32).unwrap();
        let other = PhasePlans::new(&recipe, full, &cuts, true).unwrap_err();
        assert_eq!(
            other,
            FormatError::CutsOfOtherRows {
                full,
                rows: 96,
                world: 2
            }
        );

        if multiple > 1 {
            let shape = Shape::new(64, multiple + 1);
            let bad = GatherPlan::new(&recipe, shape, 2, Usage::BOTH);
            let name = recipe.name();
            assert_eq!(
                bad,
                Err(FormatError::Columns {
                    recipe: name,
                    shape,
                    multiple
                })
            );
        }
    }
}

/// What a recipe promises: docs/scale-layouts.md, the gather table.
struct Contract {
    recipe: &'static str,
    forward: &'static [&'static str],
    backward: &'static [&'static str],
    /// Kept after forward when nothing is dropped.
    once: &'static [&'static str],
    /// Work after the gather, before backward.
    derived: &'static [&'static str],
    /// Re-interleaved after the gather.
    interleaved: &'static [&'static str],
    /// Row quantum for both usages and for rowwise only.
    quantum: [usize; 2],
}

const ROW: &[&str] = &["rowwise_data", "rowwise_scale_inv"];
const COL: &[&str] = &["columnwise_data", "columnwise_scale_inv"];
const BOTH: &[&str] = &[
    "rowwise_data",
    "rowwise_scale_inv",
    "columnwise_data",
    "columnwise_scale_inv",
];
const SHARED: &[&str] = &["shared_data", "shared_scale_inv"];

const CONTRACTS: &[Contract] = &[
    per_tensor("fp8-delayed"),
    per_tensor("fp8-current"),
    Contract {
        recipe: "fp8-rowwise",
        forward: ROW,
        backward: &["columnwise_data"],
        once: &["rowwise_data", "columnwise_data", "rowwise_scale_inv"],
        derived: &[],
        interleaved: &["columnwise_data"],
        quantum: [1, 1],
    },
    Contract {
        recipe: "fp8-block",
        forward: ROW,
        backward: ROW,
        once: ROW,
        derived: COL,
        interleaved: &[],
        quantum: [128, 128],
    },
    Contract {
        recipe: "fp8-block-1d",
        forward: ROW,
        backward: COL,
        once: BOTH,
        derived: &[],
        interleaved: &["rowwise_scale_inv", "columnwise_data"],
        quantum: [128, 1],
    },
    Contract {
        recipe: "mxfp4",
        forward: ROW,
        backward: COL,
        once: BOTH,
        derived: &[],
        interleaved: COL,
        quantum: [32, 1],
    },
    Contract {
        recipe: "nvfp4-mxfp8",
        forward: ROW,
        backward: COL,
        once: BOTH,
        derived: &[],
        interleaved: &[],
        quantum: [32, 1],
    },
    Contract {
        recipe: "mxfp8",
        forward: ROW,
        backward: COL,
        once: BOTH,
        derived: &[],
        interleaved: &[],
        quantum: [32, 1],
    },
    Contract {
        recipe: "mxfp8-2d",
        forward: SHARED,
        backward: SHARED,
        once: SHARED,
        derived: &[],
        interleaved: &[],
        quantum: [32, 32],
    },
    Contract {
        recipe: "nvfp4-1d",
        forward: ROW,
        backward: COL,
        once: BOTH,
        derived: &[],
        interleaved: COL,
        quantum: [16, 1],
    },
    Contract {
        recipe: "nvfp4-2d",
        forward: ROW,
        backward: ROW,
        once: ROW,
        derived: COL,
        interleaved: &[],
        quantum: [16, 16],
    },
];

const fn per_tensor(recipe: &'static str) -> Contract {
    Contract {
        recipe,
        forward: &["rowwise_data"],
        backward: &["rowwise_data"],
        once: &["rowwise_data"],
        derived: &["columnwise_data"],
        interleaved: &[],
        quantum: [1, 1],
    }
}

#[test]
fn each_recipe_sends_what_it_promises() {
    let full = Shape::new(136, 160);
    for contract in CONTRACTS {
        let name = contract.recipe;
        let recipe = AnyRecipe::from_name(name, &RecipeOptions::default()).unwrap();
        let quantum = [Usage::BOTH, Usage::ROWWISE].map(|usage| recipe.row_quantum(usage));
        assert_eq!(quantum, contract.quantum, "{name}");

        let cuts = RowCuts::new(full.rows, 3, quantum[0]).unwrap();
        let again = PhasePlans::new(&recipe, full, &cuts, true).unwrap();
        assert_eq!(gathered(&again.forward), contract.forward, "{name}");
        assert_eq!(gathered(&again.backward), contract.backward, "{name}");
        assert_eq!(derived(&again.forward), [""; 0], "{name}");
        assert_eq!(derived(&again.backward), contract.derived, "{name}");

        let once = PhasePlans::new(&recipe, full, &cuts, false).unwrap();
        assert_eq!(gathered(&once.forward), contract.once, "{name}");
        let kept = once
            .forward
            .kept()
            .filter(|spec| spec.origin == Origin::Quantized);
        let kept: Vec<String> = kept.map(|spec| spec.key.to_string()).collect();
        assert_eq!(kept, contract.once, "{name}");
        assert_eq!(gathered(&once.backward), [""; 0], "{name}");
        assert_eq!(derived(&once.backward), contract.derived, "{name}");

        for step in again.forward.steps.iter().chain(&again.backward.steps) {
            if let GatherStep::Concat { spec, layout, .. } = step {
                let interleaved = contract
                    .interleaved
                    .contains(&spec.key.to_string().as_str());
                assert_eq!(
                    *layout == PieceLayout::Interleave,
                    interleaved,
                    "{name} {}",
                    spec.key
                );
            }
        }
    }
}

/// The tensor scale is agreed, so it is never on the wire.
#[test]
fn replicated_buffers_are_not_sent() {
    for recipe in AnyRecipe::all() {
        let plan = GatherPlan::new(&recipe, Shape::new(64, 64), 2, Usage::BOTH).unwrap();
        for step in &plan.steps {
            let replicated = step.spec().origin == Origin::Replicated;
            assert_eq!(matches!(step, GatherStep::Replicated { .. }), replicated);
        }
    }
}
