//! Golden vectors of whole tensors: every family, shape and recipe, through the public path.

use std::collections::BTreeSet;

use lowp_format::{
    AnyRecipe, Code, Form, Fp8Format, Orientation, Part, QuantizedTensor, Quantizers, Recipe,
    RecipeOptions, Role, ScaleRule, Shape, SourceRounding, Usage, hadamard_rows, tensor_scale,
};
use lowp_kernels::{AmaxJob, Backend, Cpu, CpuBuffer, Quantized, Slot, Source, Work};
use lowp_shard::{dequantize, quantize, scales_in_form};
use lowp_tests::golden::{Golden, first_difference};
use lowp_tests::model::is_delayed;

/// The weight of a recipe, or its activation: an operand that passes a Hadamard transform along its columns.
#[derive(Clone, Copy, Debug)]
struct Cast(AnyRecipe, Role);

impl Recipe for Cast {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn quantizers(&self, _: Role) -> Quantizers {
        self.0.quantizers(self.1)
    }

    fn source_rounding(&self) -> SourceRounding {
        self.0.source_rounding()
    }
}

/// The golden name of a recipe, and how it is cast.
type Case = (&'static str, Cast);

/// Names and values of options.
type Options = &'static [(&'static str, &'static str)];

/// Recipes by golden name: a name, its recipe, and options.
fn cases() -> Vec<Case> {
    let set = |options: &[(&str, &str)]| {
        let mut made = RecipeOptions::default();
        options.iter().for_each(|(name, text)| made.set(name, text));
        made
    };
    let e4m3: Options = &[("format", "e4m3")];
    let e5m2: Options = &[("format", "e5m2")];
    let f32_scales: Options = &[("pow2", "false")];
    let weights: [(&str, &str, Options); 32] = [
        ("delayed_e4m3", "fp8-delayed", e4m3),
        ("delayed_e5m2", "fp8-delayed", e5m2),
        ("current_e4m3", "fp8-current", e4m3),
        ("current_e5m2", "fp8-current", e5m2),
        (
            "current_e4m3_pow2",
            "fp8-current",
            &[("format", "e4m3"), ("pow2", "true")],
        ),
        ("fp8_rowwise_e4m3", "fp8-rowwise", &[]),
        ("fp8_rowwise_e5m2", "fp8-rowwise", e5m2),
        ("fp8_rowwise_e4m3_pow2", "fp8-rowwise", &[("pow2", "true")]),
        ("block1d_e4m3", "fp8-block-1d", &[]),
        ("block1d_e5m2", "fp8-block-1d", e5m2),
        ("block1d_e4m3_f32scale", "fp8-block-1d", f32_scales),
        ("block2d_e4m3", "fp8-block", &[]),
        ("block2d_e5m2", "fp8-block", e5m2),
        ("block2d_e4m3_f32scale", "fp8-block", f32_scales),
        ("mxfp8_e4m3", "mxfp8", &[]),
        ("mxfp8_e5m2", "mxfp8", e5m2),
        ("mxfp8_e4m3_floor", "mxfp8", &[("scale_mode", "ocp-floor")]),
        ("mxfp8_2d_e4m3", "mxfp8-2d", &[]),
        ("mxfp4", "mxfp4", &[]),
        ("mxfp4_floor", "mxfp4", &[("scale_mode", "ocp-floor")]),
        ("mxfp4_even", "mxfp4", &[("scale_mode", "even")]),
        ("nvfp4_1d", "nvfp4-1d", &[]),
        ("nvfp4_1d_fo6_mae", "nvfp4-1d", &[("four_over_six", "mae")]),
        ("nvfp4_1d_fo6_mse", "nvfp4-1d", &[("four_over_six", "mse")]),
        (
            "nvfp4_1d_fo6_mae_448",
            "nvfp4-1d",
            &[("four_over_six", "mae-448")],
        ),
        (
            "nvfp4_1d_fo6_mse_448",
            "nvfp4-1d",
            &[("four_over_six", "mse-448")],
        ),
        ("nvfp4_1d_rowscaled", "nvfp4-1d", &[("row_scaled", "true")]),
        ("nvfp4_2d", "nvfp4-2d", &[]),
        ("nvfp4_2d_fo6_mae", "nvfp4-2d", &[("four_over_six", "mae")]),
        ("nvfp4_2d_fo6_mse", "nvfp4-2d", &[("four_over_six", "mse")]),
        (
            "nvfp4_2d_fo6_mae_448",
            "nvfp4-2d",
            &[("four_over_six", "mae-448")],
        ),
        (
            "nvfp4_2d_fo6_mse_448",
            "nvfp4-2d",
            &[("four_over_six", "mse-448")],
        ),
    ];
    let make = |name: &str, options: &[_]| {
        AnyRecipe::from_name(name, &set(options)).expect("a known recipe")
    };
    let weight = |(golden, name, options)| (golden, Cast(make(name, options), Role::Weight));
    let mut cases: Vec<Case> = weights.map(weight).to_vec();
    let transformed = Cast(make("nvfp4-1d", &[("hadamard", "true")]), Role::Activation);
    cases.push(("nvfp4_1d_rht", transformed));
    cases
}

type Tensor = QuantizedTensor<CpuBuffer<u8>, Cast>;

/// One tensor of a golden file, cast for `usage`.
fn cast(golden: &Golden, case: Cast, usage: Usage, source: &Source<Cpu>) -> Tensor {
    let shape = Shape::from_dims(&golden.shape("x")).expect("a matrix");
    let source = source.clone();
    let Cast(recipe, role) = case;
    let tensor = if role == Role::Weight {
        let scale = is_delayed(&recipe).then(|| golden.number("delayed_scale") as f32);
        quantize(&Cpu, case, shape, usage, source, scale).map_err(|e| e.to_string())
    } else {
        let made = Quantized::encode_source(&Cpu, case, shape, usage, source);
        made.map(Quantized::into_tensor).map_err(|e| e.to_string())
    };
    tensor.unwrap_or_else(|e| panic!("{case:?} {shape}: {e}"))
}

fn part(tensor: &Tensor, o: Orientation, part: Part) -> Option<Vec<u8>> {
    let buffer = tensor.part(o, part)?;
    Some(Cpu.download(&buffer.storage).expect("bytes"))
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// The amax of all values.
fn amax(tensor: &Tensor, source: &Source<Cpu>) -> f32 {
    let out = Cpu.alloc::<f32>(1).expect("room");
    let entry = Slot {
        buffer: out.clone(),
        index: 0,
    };
    let job = AmaxJob::new(&tensor.recipe(), tensor.shape(), source.clone(), entry);
    Cpu.once(Work::Amax(vec![job])).expect("an amax");
    Cpu.download(&out).expect("a value")[0]
}

/// What the values are behind the transform, with columns along the rows: as the codes lie.
fn transformed(shape: Shape, mut values: Vec<f32>) -> Vec<f32> {
    hadamard_rows(&mut values, shape.cols);
    let column = |col| values.iter().skip(col).step_by(shape.cols).copied();
    (0..shape.cols).flat_map(column).collect()
}

/// What `tensor` has under the name `what` of a golden tensor; `None` where it has no such thing.
fn found(tensor: &Tensor, what: &str, golden: &Golden, source: &Source<Cpu>) -> Option<Vec<u8>> {
    let (rowwise, columnwise) = (Orientation::Rowwise, Orientation::Columnwise);
    let kernel = tensor.recipe().quantizers(Role::Weight).rowwise.kernel;
    let in_form = |o: Orientation, form| {
        let scales = scales_in_form(&Cpu, tensor, o, form).expect("a form");
        scales.map(|(_, bytes)| bytes)
    };
    let of = |o: Orientation, what: &str| match what {
        "data" => part(tensor, o, Part::Data),
        "scale_inv" => in_form(o, Form::Padded).or_else(|| part(tensor, o, Part::DecodeScale)),
        "scale_inv_swizzled" => in_form(o, Form::Swizzled),
        _ => None,
    };
    match what {
        "scale_inv" => part(tensor, rowwise, Part::DecodeScale),
        "amax_columnwise" => part(tensor, columnwise, Part::Amax),
        "amax" => {
            part(tensor, rowwise, Part::Amax).or_else(|| Some(bytes(&[amax(tensor, source)])))
        }
        "scale" => {
            let ScaleRule::Current { pow2, epsilon, .. } = kernel.scale else {
                return None;
            };
            let scale = tensor_scale(amax(tensor, source), kernel.element, pow2, epsilon);
            Some(bytes(&[scale]))
        }
        "dequantized" => dequantize(&Cpu, tensor, rowwise)
            .ok()
            .map(|values| bytes(&values)),
        "transformed" => Some(bytes(&transformed(tensor.shape(), golden.f32("x")))),
        _ => {
            let (o, what) = what.split_once('_')?;
            let o = Orientation::ALL
                .into_iter()
                .find(|found| found.to_string() == o)?;
            of(o, what)
        }
    }
}

/// Compares every tensor of the file that is named `<prefix>.*` with `tensor`, as far as it has `usage`.
fn compare(
    golden: &Golden,
    prefix: &str,
    tensor: &Tensor,
    source: &Source<Cpu>,
) -> BTreeSet<String> {
    let mut compared = BTreeSet::new();
    for name in golden.tensors() {
        let Some(what) = name.strip_prefix(prefix).and_then(|n| n.strip_prefix('.')) else {
            continue;
        };
        let found = found(tensor, what, golden, source);
        let found = found.unwrap_or_else(|| panic!("{name}: the tensor has no such part"));
        let expected = golden.bytes(&name);
        assert_eq!(found.len(), expected.len(), "{name}: bytes");
        if let Some(at) = found.iter().zip(expected).position(|(a, b)| a != b) {
            let words = |bytes: &[u8]| -> Vec<f32> {
                let words = bytes.as_chunks().0.iter();
                words.map(|&word| f32::from_le_bytes(word)).collect()
            };
            // Any NaN is as good as another.
            let values = ["dequantized", "transformed"].contains(&what);
            let same = values && first_difference(&words(&found), &words(expected)).is_none();
            assert!(
                same,
                "{name}: byte {at} is {} and not {}",
                found[at], expected[at]
            );
        }
        compared.insert(name);
    }
    compared
}

/// Files of whole tensors.
fn files() -> Vec<String> {
    let whole =
        |name: &str| name.starts_with("ext_") || name.starts_with(|c: char| c.is_ascii_digit());
    Golden::names()
        .into_iter()
        .filter(|name| whole(name))
        .collect()
}

fn source(golden: &Golden) -> Source<Cpu> {
    Source::F32(Cpu.upload(&golden.f32("x")).expect("room"))
}

/// The golden tensors are there in `tensor`'s orientation.
fn has(golden: &Golden, prefix: &str) -> bool {
    golden.has(&format!("{prefix}.rowwise_data"))
}

#[test]
fn every_vector_of_every_family_and_shape() {
    let (mut compared, mut used) = (0, BTreeSet::new());
    for name in files() {
        let golden = Golden::open(&name);
        let source = source(&golden);
        let mut found = BTreeSet::from(["x".to_owned()]);
        for (prefix, case) in cases() {
            if has(&golden, prefix) {
                let tensor = cast(&golden, case, Usage::BOTH, &source);
                found.append(&mut compare(&golden, prefix, &tensor, &source));
                used.insert(prefix);
            }
        }
        let all: BTreeSet<String> = golden.tensors().into_iter().collect();
        let missed: Vec<&String> = all.difference(&found).collect();
        assert!(missed.is_empty(), "{name}: nothing compared {missed:?}");
        compared += found.len();
    }
    assert!(compared > 2000, "only {compared} golden tensors compared");
    // Of 4/6 up to 448 the files have one error each.
    let unused: Vec<&str> = cases()
        .into_iter()
        .map(|c| c.0)
        .filter(|c| !used.contains(c))
        .collect();
    assert_eq!(unused, ["nvfp4_1d_fo6_mse_448", "nvfp4_2d_fo6_mae_448"]);
}

#[test]
fn each_usage_alone_gives_the_same_bytes() {
    for name in [
        "96x160_normal_bf16",
        "ext_37x96_normal_bf16",
        "ext_16x32_normal_bf16",
    ] {
        let golden = Golden::open(name);
        let source = source(&golden);
        for (prefix, case) in cases()
            .into_iter()
            .filter(|(prefix, _)| has(&golden, prefix))
        {
            for o in Orientation::ALL {
                let tensor = cast(&golden, case, o.usage(), &source);
                let name = format!("{prefix}.{o}_data");
                assert_eq!(
                    part(&tensor, o, Part::Data).expect("data"),
                    golden.bytes(&name),
                    "{name}"
                );
                let name = format!("{prefix}.{o}_scale_inv");
                if golden.has(&name) {
                    let scales = found(&tensor, &format!("{o}_scale_inv"), &golden, &source);
                    assert_eq!(scales.expect("scales"), golden.bytes(&name), "{name}");
                }
            }
        }
    }
}

#[test]
fn a_bf16_source_gives_the_same_bytes() {
    for name in [
        "64x96_normal_bf16",
        "ext_37x96_normal_bf16",
        "ext_130x140_normal_bf16",
    ] {
        let golden = Golden::open(name);
        let values = golden.f32("x").into_iter().map(half::bf16::from_f32);
        let values: Vec<half::bf16> = values.collect();
        let source = Source::Bf16(Cpu.upload(&values).expect("room"));
        for (prefix, case) in cases()
            .into_iter()
            .filter(|(prefix, _)| has(&golden, prefix))
        {
            let tensor = cast(&golden, case, Usage::BOTH, &source);
            assert!(compare(&golden, prefix, &tensor, &source).len() >= 2);
        }
    }
}

/// A recipe by direction: rowwise NVFP4, columnwise MXFP8, each as if it were alone.
#[test]
fn a_hybrid_has_the_rows_of_one_recipe_and_the_columns_of_another() {
    let sides = [
        ("nvfp4_1d", "nvfp4-1d", Orientation::Rowwise),
        ("mxfp8_e4m3", "mxfp8", Orientation::Columnwise),
    ];
    let hybrid =
        |options: &RecipeOptions| AnyRecipe::from_name("nvfp4-mxfp8", options).expect("a recipe");
    let alone = |name| AnyRecipe::from_name(name, &RecipeOptions::default()).expect("a recipe");
    let mut files = 0;
    for name in self::files() {
        let golden = Golden::open(&name);
        let shape = Shape::from_dims(&golden.shape("x")).expect("a matrix");
        let recipes = [alone("mxfp8"), hybrid(&RecipeOptions::default())];
        if recipes.iter().any(|recipe| recipe.check(shape).is_err()) {
            continue;
        }
        files += 1;
        let source = source(&golden);
        let tensor = cast(
            &golden,
            Cast(hybrid(&RecipeOptions::default()), Role::Weight),
            Usage::BOTH,
            &source,
        );
        for (prefix, recipe, o) in sides {
            let alone = cast(
                &golden,
                Cast(alone(recipe), Role::Weight),
                o.usage(),
                &source,
            );
            let serving =
                |b: &&lowp_format::Buffer<CpuBuffer<u8>>| b.spec.key.usage.contains(o.usage());
            let parts = |tensor: &Tensor| -> Vec<(Part, Vec<u8>)> {
                let buffers = tensor.buffers().iter().filter(serving);
                let bytes = |buffer: &CpuBuffer<u8>| Cpu.download(buffer).expect("bytes");
                buffers
                    .map(|b| (b.spec.key.part, bytes(&b.storage)))
                    .collect()
            };
            assert_eq!(parts(&tensor), parts(&alone), "{name} {o}");
            for what in ["data", "scale_inv", "scale_inv_swizzled"] {
                let golden_name = format!("{prefix}.{o}_{what}");
                if golden.has(&golden_name) {
                    let found = found(&tensor, &format!("{o}_{what}"), &golden, &source);
                    assert_eq!(
                        found.expect("a part"),
                        golden.bytes(&golden_name),
                        "{golden_name}"
                    );
                }
            }
        }
    }
    assert!(files > 30, "{files} files");
    // Options reach the side that has them.
    let changed = RecipeOptions::default().with("format", Fp8Format::E5M2);
    let [row, col] = hybrid(&changed).quantizers(Role::Weight).kernels();
    assert_eq!([row.element, col.element], [Code::E2M1, Code::E5M2]);
}
