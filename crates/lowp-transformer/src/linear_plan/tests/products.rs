//! The products of codes that a layer asks cuBLASLt for: the arguments that it gets, and that what it then multiplies are the decoded operands.

use std::fmt::Write as _;
use std::sync::Arc;

use half::bf16;
use lowp_comm::LocalComm;
use lowp_format::{AnyRecipe, Buffer, Form, KernelKey, RecipeOptions, ScaleRule};
use lowp_fsdp::{LayerMemory, OperandPart, OperandPlan, RecipeOperands};
use lowp_gemm::{Call, CallOperand, Dtype, GemmDesc, Matrix, OperandDesc};
use lowp_kernels::{
    Backend, Cpu, CpuBuffer, DecodeJob, Quantized, RepackJob, Source, Target, Work,
};
use lowp_shard::ScaleBookBuilder;

use super::super::*;
use super::as_documented::{ALIGNMENT, Narrow, entry, is_aligned};

/// No side is a multiple of a scale tile: of rows there are two and a half, one and a quarter, two and a quarter, and the last tile of
/// blocks has one or two of four.
const WEIGHT: Shape = Shape::new(320, 160);
const TOKENS: usize = 288;

const B200: (i32, i32) = (10, 0);
const RTX: (i32, i32) = (12, 0);

fn recipe(name: &str, options: &[(&str, &str)]) -> AnyRecipe {
    let mut given = RecipeOptions::default();
    for (name, value) in options {
        given.set(name, value);
    }
    AnyRecipe::from_name(name, &given).expect("a recipe")
}

fn shape(role: Role) -> Shape {
    match role {
        Role::Weight => WEIGHT,
        Role::Activation => Shape::new(TOKENS, WEIGHT.cols),
        Role::Gradient => Shape::new(TOKENS, WEIGHT.rows),
    }
}

/// Blocks of 16 differ in size, so that a scale that is read elsewhere shows.
fn values(role: Role) -> Vec<f32> {
    let random = |x: usize| (x as u64 ^ role as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 33;
    let Shape { rows, cols } = shape(role);
    let value = |at: usize| {
        let (row, col) = (at / cols, at % cols);
        let block = random(row / 16 * 1009 + col / 16 * 7919 + 3) % 12;
        let unit = random(at) as f32 / (1u64 << 30) as f32 - 1.0;
        bf16::from_f32(unit * 2f32.powi(block as i32 - 6)).to_f32()
    };
    (0..rows * cols).map(value).collect()
}

/// What a product reads, and what it stands for.
struct Made {
    desc: OperandDesc,
    codes: Vec<u8>,
    scales: Vec<u8>,
    /// Of two-level scales.
    amax: f32,
    largest: f32,
    decoded: Vec<f32>,
}

type Found = Option<Target<Cpu>>;

impl Made {
    fn new(
        kind: GemmKind,
        (role, orientation): (Role, Orientation),
        kernel: KernelKey,
        find: impl Fn(Part) -> Found,
    ) -> Self {
        let shape = shape(role);
        let (data, block) = (find(Part::Data), find(Part::BlockScale));
        let (data, block) = (data.expect("codes"), block.expect("scales"));
        let layout = |form| ScaleLayout::new(&block.spec, shape, orientation, form).expect("one");
        let (from, to) = (layout(Form::Compact), layout(Form::Swizzled));
        let swizzled = Cpu.alloc(to.bytes()).expect("room");
        let repack = RepackJob {
            from_layout: from,
            to_layout: to,
            from: block.bytes.clone(),
            to: swizzled.clone(),
        };
        Cpu.once(Work::Repack(vec![repack])).expect("a copy");
        let (amax, largest) = match kernel.scale {
            ScaleRule::TwoLevel { four_over_six, .. } => {
                let amax = Cpu.download(&find(Part::Amax).expect("an amax").bytes);
                let amax = amax.expect("bytes").try_into().expect("four of them");
                (f32::from_le_bytes(amax), four_over_six.largest())
            }
            _ => (1.0, 1.0),
        };
        let out = Cpu.alloc::<f32>(shape.elements()).expect("room");
        let outer = kernel.scale.outer().and_then(|(_, part)| find(part));
        let specs = [&data.spec, &block.spec];
        let desc = OperandDesc::of_codes(kind, orientation, specs).expect("codes");
        let codes = Cpu.download(&data.bytes).expect("codes");
        let decode = DecodeJob {
            shape,
            kernel,
            data,
            block_scale: Some(block),
            tensor_scale: outer.map(|target| target.bytes),
            out: Source::F32(out.clone()),
        };
        Cpu.once(Work::Decode(vec![decode])).expect("values");
        Self {
            desc,
            codes,
            scales: Cpu.download(&swizzled).expect("scales"),
            amax,
            largest,
            decoded: Cpu.download(&out).expect("values"),
        }
    }

    /// A weight as it is stored, other operands as a layer casts them.
    fn of(recipe: &AnyRecipe, kind: GemmKind, (role, orientation): (Role, Orientation)) -> Self {
        let (operand, shape, values) = ((role, orientation), shape(role), values(role));
        if role == Role::Weight {
            let tensor = Quantized::encode(&Cpu, *recipe, shape, &values).expect("codes");
            let tensor = tensor.tensor();
            let target = |b: &Buffer<CpuBuffer<u8>>| Target::new(b.spec, b.storage.clone());
            let find = |part| tensor.part(orientation, part).map(target);
            return Self::new(kind, operand, recipe.kernel(orientation), find);
        }
        let mut book = ScaleBookBuilder::default();
        let plan = OperandPlan::new(recipe, &mut book, 1, 0);
        let book = Arc::new(book.build(&Cpu).expect("a book"));
        let world = Arc::new(LocalComm::solo(&Cpu));
        let memory = LayerMemory::new(&Cpu);
        let operands = RecipeOperands::new(&Cpu, plan, book, Arc::default(), world, memory);
        let values: Vec<_> = values.into_iter().map(bf16::from_f32).collect();
        let source = Source::Bf16(Cpu.upload(&values).expect("values"));
        let part = OperandPart {
            shape,
            usage: Usage::BOTH,
            first_token: 0,
        };
        let cast = operands.plan_encode(role, part, &source, [None, None], |_| Ok(None));
        let cast = cast.expect("a cast");
        operands.run_encode(&cast, true).expect("codes");
        let find = |part| cast.target(orientation, part).cloned();
        Self::new(
            kind,
            operand,
            cast.quantizers().of(orientation).kernel,
            find,
        )
    }
}

fn call(pass: Pass, [right, left]: [OperandDesc; 2]) -> Call {
    let sizes = pass.sizes(WEIGHT, TOKENS);
    GemmDesc::new(sizes, [left, right], Dtype::Bf16).call()
}

/// Entry `at` of the result is the product of the decoded operands, within `error` of the sum of magnitudes; else both.
fn wrong(pass: Pass, made: &[Made; 2], error: f64) -> Option<([usize; 2], f64, f64)> {
    let call = call(pass, made.each_ref().map(|made| made.desc));
    let read = |at: usize| {
        let Made { codes, scales, .. } = &made[at];
        Narrow::new(&call.operands[at], at == 0, codes, scales)
    };
    let (a, b) = (read(0), read(1));
    let reciprocal = 1.0 / (made[0].largest * made[1].largest);
    let alpha = made[1].amax * reciprocal * made[0].amax;
    let [rows, cols, k] = pass.sizes(WEIGHT, TOKENS);
    let decoded = |at: usize, outer: usize, k: usize| {
        let (role, orientation) = pass.operands()[at];
        let at_outer = match orientation {
            Orientation::Rowwise => outer * shape(role).cols + k,
            Orientation::Columnwise => k * shape(role).cols + outer,
        };
        f64::from(made[at].decoded[at_outer])
    };
    // Each row and each column at least once.
    (0..rows.max(cols)).find_map(|at| {
        let (row, col) = (at % rows, (7 * at + 3) % cols);
        let terms = (0..k).map(|k| decoded(0, col, k) * decoded(1, row, k));
        let (expected, magnitude) = terms.fold((0.0, 0.0), |(sum, all), term| {
            (sum + term, all + term.abs())
        });
        let found = entry([&a, &b], [col, row], alpha);
        let right = (found - expected).abs() <= error * magnitude && magnitude > 0.0;
        (!right).then_some(([row, col], found, expected))
    })
}

/// Powers of two are exact. Decoding a two-level operand rounds twice and alpha is rounded four times.
fn error(kind: GemmKind) -> f64 {
    match kind {
        GemmKind::Fp4Groups16 => 2f64.powi(-20),
        _ => 0.0,
    }
}

const RECIPES: [(&str, &[(&str, &str)]); 9] = [
    ("mxfp8", &[]),
    ("mxfp8-2d", &[]),
    ("nvfp4-1d", &[]),
    (
        "nvfp4-1d",
        &[("hadamard", "false"), ("four_over_six", "mae")],
    ),
    ("nvfp4-1d", &[("four_over_six", "mse-448")]),
    ("nvfp4-2d", &[]),
    (
        "nvfp4-2d",
        &[("hadamard", "false"), ("four_over_six", "mse")],
    ),
    ("nvfp4-mxfp8", &[]),
    ("nvfp4-mxfp8", &[("four_over_six", "mae")]),
];

#[test]
fn products_of_swizzled_operands_are_those_of_decoded_ones() {
    for (name, options) in RECIPES {
        let recipe = recipe(name, options);
        let names = OperandNames::new("decoded", "in", ["in", "kept in"]);
        let plan = LinearPlan::new(&recipe, WEIGHT, TOKENS, &names, B200);
        let plan = plan.expect("a plan");
        for (pass, kind) in Pass::ALL.into_iter().zip(plan.products) {
            let what = format!("{name} {options:?}, {}", pass.name());
            assert_eq!(kind.scale_form(), Some(Form::Swizzled), "{what}");
            let made = pass
                .operands()
                .map(|operand| Made::of(&recipe, kind, operand));
            for ((role, orientation), made) in pass.operands().into_iter().zip(&made) {
                // A layer has room for these scales, and makes them.
                let room = match role {
                    Role::Weight => match plan.weights[pass as usize] {
                        WeightUse::Repack { form, place } => Some((form, place.bytes)),
                        _ => None,
                    },
                    _ => {
                        let mut repacks = plan.repacks.iter();
                        let repack =
                            repacks.find(|r| (r.role, r.orientation) == (role, orientation));
                        repack.map(|repack| (repack.form, repack.to.bytes))
                    }
                };
                assert_eq!(
                    room,
                    Some((Form::Swizzled, made.scales.len())),
                    "{what} {role:?}"
                );
            }
            assert_eq!(wrong(pass, &made, error(kind)), None, "{what}");
        }
    }
}

/// The comparison finds two scales that are exchanged, and an alpha of one amax.
#[test]
fn what_lies_elsewhere_is_found() {
    for (name, kind) in [
        ("mxfp8", GemmKind::Fp8Groups32),
        ("nvfp4-1d", GemmKind::Fp4Groups16),
    ] {
        let (recipe, pass) = (recipe(name, &[]), Pass::Forward);
        let make = || {
            pass.operands()
                .map(|operand| Made::of(&recipe, kind, operand))
        };
        let mut made = make();
        let scales = &mut made[1].scales;
        // Of row 1 and of row 32, in the order of rows.
        assert_ne!(scales[16], scales[4]);
        scales.swap(16, 4);
        assert!(wrong(pass, &made, error(kind)).is_some(), "{name}");
        let mut made = make();
        made[0].amax *= 2.0;
        assert!(wrong(pass, &made, error(kind)).is_some(), "{name}");
    }
}

/// The arguments of cuBLASLt in each pass of a layer of 256 outputs and 384 inputs over 512 tokens, where it multiplies codes.
#[test]
fn calls_by_recipe_and_pass() {
    let (weight, tokens) = (Shape::new(256, 384), 512);
    let mut text = String::new();
    for (device, capability) in [("sm_90", (9, 0)), ("sm_100", B200), ("sm_120", RTX)] {
        for recipe in AnyRecipe::all() {
            for pass in Pass::ALL {
                let kind = GemmKind::of_recipe(&recipe, pass, capability);
                if kind == GemmKind::Bf16 {
                    continue;
                }
                let [right, left] = pass.operands().map(|(role, orientation)| {
                    let specs = recipe.operand(role).buffers();
                    let find = |part| specs.iter().find(|s| s.key.serves(orientation, part));
                    let scales = match kind.scale_form() {
                        Some(_) => find(Part::BlockScale),
                        None => find(Part::DecodeScale),
                    };
                    let specs = [find(Part::Data).expect("codes"), scales.expect("scales")];
                    OperandDesc::of_codes(kind, orientation, specs).expect("codes")
                });
                let sizes = pass.sizes(weight, tokens);
                let call = GemmDesc::new(sizes, [left, right], Dtype::Bf16).call();
                assert!(is_aligned(&call), "{call:?}");
                let [a, b] = call.operands.map(|operand| described(&operand));
                let result = matrix(&call.result);
                let name = (recipe.name(), pass.name());
                writeln!(
                    text,
                    "{device} {} {}: D {result}\n  A {a}\n  B {b}",
                    name.0, name.1
                )
                .expect("a line");
            }
        }
    }
    text += &format!("addresses and leading dimensions are multiples of {ALIGNMENT} bytes\n");
    insta::assert_snapshot!(text);
}

fn described(operand: &CallOperand) -> String {
    let CallOperand {
        matrix: of,
        transposed,
        scale,
    } = operand;
    let turned = if *transposed { "T" } else { "N" };
    format!("{turned} {}, scales {scale:?}", matrix(of))
}

fn matrix(of: &Matrix) -> String {
    let Matrix {
        dtype,
        rows,
        cols,
        ld,
        ..
    } = of;
    format!("{dtype:?} {rows} x {cols}, ld {ld}")
}
