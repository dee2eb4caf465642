//! Plans of layers, and the products that they ask for.

mod as_documented;
mod products;

use super::*;
use std::sync::Arc;

use lowp_comm::LocalComm;
use lowp_format::AnyRecipe;
use lowp_fsdp::{LayerMemory, OperandPart, OperandPlan, RecipeOperands};
use lowp_kernels::{Backend, Cpu, Source};
use lowp_shard::ScaleBookBuilder;

const SHAPE: Shape = Shape::new(256, 384);
const TOKENS: usize = 128;
const HOPPER: (i32, i32) = (9, 0);
const BLACKWELL: (i32, i32) = (10, 0);
const CONSUMER_BLACKWELL: (i32, i32) = (12, 0);

fn plan(recipe: &AnyRecipe, capability: (i32, i32)) -> LinearPlan {
    let names = OperandNames::new("decoded", "in", ["in", "kept in"]);
    let plan = LinearPlan::new(recipe, SHAPE, TOKENS, &names, capability);
    plan.expect("a plan")
}

/// What a layer casts into is what is planned, and holds what is decoded and repacked.
#[test]
fn operands_are_cast_into_the_planned_buffers() {
    for recipe in AnyRecipe::all() {
        let mut book = ScaleBookBuilder::default();
        let operands = OperandPlan::new(&recipe, &mut book, 1, 0);
        let book = Arc::new(book.build(&Cpu).expect("a book"));
        let world = Arc::new(LocalComm::solo(&Cpu));
        let memory = LayerMemory::new(&Cpu);
        let operands = RecipeOperands::new(&Cpu, operands, book, Arc::default(), world, memory);
        let encode = |plan: &LinearPlan, role, width: usize| {
            let shape = Shape::new(TOKENS, width);
            let room = || Cpu.alloc(shape.elements()).expect("room");
            let part = OperandPart {
                shape,
                usage: Usage::BOTH,
                first_token: 0,
            };
            let values = Orientation::ALL.map(|o| is_rounded(&plan.rounded, role, o).then(room));
            let source = Source::Bf16(room());
            let planned = operands.plan_encode(role, part, &source, values, |_| Ok(None));
            planned.expect("a cast")
        };
        for capability in [HOPPER, BLACKWELL] {
            let plan = plan(&recipe, capability);
            let (x, dy) = (
                encode(&plan, Role::Activation, SHAPE.cols),
                encode(&plan, Role::Gradient, SHAPE.rows),
            );
            let bytes = |places: &[Place]| places.iter().map(|p| p.bytes).sum::<usize>();
            assert_eq!(bytes(&plan.x), x.bytes(&Cpu), "{}", recipe.name());
            assert_eq!(bytes(&plan.dy), dy.bytes(&Cpu), "{}", recipe.name());
            let of = |role: Role| if role == Role::Gradient { &dy } else { &x };
            for decode in &plan.decodes {
                let codes = of(decode.role).target(decode.from, Part::Data);
                assert!(codes.is_some(), "{}: {decode:?}", recipe.name());
            }
            for repack in &plan.repacks {
                let scales = of(repack.role).target(repack.orientation, Part::BlockScale);
                assert!(scales.is_some(), "{}: {repack:?}", recipe.name());
            }
        }
    }
}

/// Products of codes decode nothing, and those of values read every operand that holds codes decoded, or rounded.
#[test]
fn what_is_decoded_follows_from_the_products() {
    for recipe in AnyRecipe::all() {
        for capability in [HOPPER, BLACKWELL] {
            let plan = plan(&recipe, capability);
            for (pass, product) in Pass::ALL.into_iter().zip(plan.products) {
                let operands = pass.operands().map(|(role, orientation)| {
                    let here = |d: &&Decode| (d.role, d.orientation) == (role, orientation);
                    let usage = encoded(&recipe.operand(role), Code::Bf16);
                    let codes = role != Role::Weight && usage.contains(orientation.usage());
                    let rounded = is_rounded(&plan.rounded, role, orientation);
                    (codes, rounded, plan.decodes.iter().any(|d| here(&d)))
                });
                for (codes, rounded, decoded) in operands {
                    let expected = codes && product == GemmKind::Bf16;
                    assert_eq!(rounded || decoded, expected, "{}: {pass:?}", recipe.name());
                    assert!(!(rounded && decoded), "{}: {pass:?}", recipe.name());
                }
            }
        }
    }
}

/// One cast stands for those of several layers where all would give the same bits.
#[test]
fn layers_share_an_input_that_they_quantize_alike() {
    for capability in [HOPPER, BLACKWELL] {
        for one in AnyRecipe::all() {
            for other in AnyRecipe::all() {
                let [a, b] = [one, other].map(|recipe| plan(&recipe, capability));
                let shared = a.shares_input(&b);
                assert_eq!(shared, b.shares_input(&a), "{one:?}, {other:?}");
                let operand = one.operand(Role::Activation);
                let kernels = operand.quantizers.kernels();
                let alike = operand == other.operand(Role::Activation);
                let kept = kernels.iter().any(|kernel| kernel.scale.is_delayed());
                assert!(!shared || alike && !kept, "{one:?}, {other:?}");
                if one == other {
                    let nearest = operand.rounding == Rounding::Nearest;
                    assert_eq!(shared, nearest && !kept, "{one:?}");
                }
                if shared {
                    assert_eq!(a.input_places(), b.input_places(), "{one:?}, {other:?}");
                }
            }
        }
    }
}

/// What activations round is in memory in no other way: no values of it, and of an input no codes where backward makes it again.
#[test]
fn operands_that_activations_round_are_not_kept_as_they_are() {
    let names = OperandNames::new("decoded", "in", ["in", "kept in"]);
    let names = names.activated().before_activation(["rows", "columns"]);
    let mut made = 0;
    for recipe in AnyRecipe::all() {
        for capability in [HOPPER, BLACKWELL, CONSUMER_BLACKWELL] {
            let plan = LinearPlan::new(&recipe, SHAPE, TOKENS, &names, capability).expect("a plan");
            let rounded = |role, orientation| is_rounded(&plan.rounded, role, orientation);
            let [rows, columns] = Orientation::ALL.map(|o| rounded(Role::Activation, o));
            assert_eq!(columns, plan.input_is_made_again, "{recipe:?}");
            assert!(rows || plan.input.is_some(), "{recipe:?}");
            assert!(!columns || plan.input.is_none(), "{recipe:?}");
            if plan.input.is_none() {
                let kernels = recipe.operand(Role::Activation).quantizers.kernels();
                assert!(kernels.iter().all(|kernel| kernel.scale.outer().is_none()));
                assert_eq!(columns, plan.x.is_empty(), "{recipe:?}");
                made += 1;
            }
            if plan.gradient_is_made {
                assert!(plan.dy.is_empty(), "{recipe:?}");
                assert!(rounded(Role::Gradient, Orientation::Rowwise), "{recipe:?}");
                let to = plan.places();
                let rows = Place::lent("rows", BF16 * TOKENS * SHAPE.rows);
                assert!(to.contains(&rows), "{recipe:?}");
            }
        }
    }
    assert!(made > 0, "no recipe is rounded where it is made");
}
