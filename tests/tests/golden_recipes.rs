//! Golden vectors of whole tensors: every family, shape and recipe, through the public path.

use lowp_format::{
    AnyRecipe, Form, Fp8Format, MxScale, Orientation, Part, QuantizedTensor, RecipeOptions, Shape,
    Usage,
};
use lowp_kernels::{Backend, Cpu, CpuBuffer, Source};
use lowp_shard::{dequantize, quantize, scales_in_form};
use lowp_tests::golden::{Golden, first_difference};

/// The golden name of each recipe, the recipe and whether its scale is given.
fn recipes() -> Vec<(&'static str, AnyRecipe, bool)> {
    let make = |name: &str, options: RecipeOptions| {
        AnyRecipe::from_name(name, &options).expect("a known recipe")
    };
    let none = RecipeOptions::default();
    let e4m3 = RecipeOptions {
        format: Some(Fp8Format::E4M3),
        ..none
    };
    let e5m2 = RecipeOptions {
        format: Some(Fp8Format::E5M2),
        ..none
    };
    let floor = RecipeOptions {
        mx_scale: Some(MxScale::OcpFloor),
        ..none
    };
    let pow2 = RecipeOptions {
        pow2: Some(true),
        ..e4m3
    };
    vec![
        ("delayed_e4m3", make("fp8-delayed", e4m3), true),
        ("delayed_e5m2", make("fp8-delayed", e5m2), true),
        ("current_e4m3", make("fp8-current", e4m3), false),
        ("current_e5m2", make("fp8-current", e5m2), false),
        ("current_e4m3_pow2", make("fp8-current", pow2), false),
        ("mxfp8_e4m3", make("mxfp8", none), false),
        ("mxfp8_e5m2", make("mxfp8", e5m2), false),
        ("mxfp8_e4m3_floor", make("mxfp8", floor), false),
        ("mxfp8_2d_e4m3", make("mxfp8-2d", none), false),
        ("nvfp4_1d", make("nvfp4-1d", none), false),
        ("nvfp4_2d", make("nvfp4-2d", none), false),
    ]
}

fn part(tensor: &QuantizedTensor<CpuBuffer<u8>>, o: Orientation, part: Part) -> Option<Vec<u8>> {
    tensor
        .part(o, part)
        .map(|b| Cpu.download(&b.storage).expect("bytes"))
}

fn word(bytes: &[u8]) -> f32 {
    f32::from_le_bytes(bytes.try_into().expect("one f32"))
}

fn assert_same(found: &[u8], expected: &[u8], what: &str) {
    let at = found.iter().zip(expected).position(|(a, b)| a != b);
    assert_eq!(at, None, "{what}: first different byte");
    assert_eq!(found.len(), expected.len(), "{what}: bytes");
}

/// Compares one tensor with the golden tensors named `<prefix>.*`; returns how many were there.
fn compare(golden: &Golden, prefix: &str, tensor: &QuantizedTensor<CpuBuffer<u8>>) -> usize {
    let mut compared = 0;
    for o in Orientation::ALL {
        let name = |part: &str| format!("{prefix}.{o}_{part}");
        if golden.has(&name("data")) {
            let found = part(tensor, o, Part::Data).expect("data");
            assert_same(&found, golden.bytes(&name("data")), &name("data"));
            compared += 1;
        }
        for (suffix, form) in [
            ("scale_inv", Form::Padded),
            ("scale_inv_swizzled", Form::Swizzled),
        ] {
            if golden.has(&name(suffix)) {
                let (_, found) = scales_in_form(&Cpu, tensor, o, form)
                    .expect("a form")
                    .expect("block scales");
                assert_same(&found, golden.bytes(&name(suffix)), &name(suffix));
                compared += 1;
            }
        }
    }
    let number = |what| part(tensor, Orientation::Rowwise, what).map(|b| word(&b));
    let (stored, number) = match number(Part::TensorAmax) {
        Some(amax) => ("amax", Some(amax)),
        None => ("scale_inv", number(Part::DecodeScale)),
    };
    for name in [stored, "amax_columnwise"].map(|n| format!("{prefix}.{n}")) {
        if golden.has(&name) {
            let found = number.expect("a number of the tensor");
            assert_eq!(
                first_difference(&[found], &golden.f32(&name)),
                None,
                "{name}"
            );
            compared += 1;
        }
    }
    let name = format!("{prefix}.dequantized");
    if golden.has(&name) {
        let found = dequantize(&Cpu, tensor, Orientation::Rowwise).expect("values");
        assert_eq!(first_difference(&found, &golden.f32(&name)), None, "{name}");
        compared += 1;
    }
    compared
}

#[test]
fn every_family_and_shape() {
    let cpu = Cpu;
    let mut compared = 0;
    for name in Golden::names() {
        let golden = Golden::open(&name);
        if !name.starts_with(|c: char| c.is_ascii_digit()) {
            continue;
        }
        let dims = golden.shape("x");
        let shape = Shape::from_dims(&dims).expect("a matrix");
        let source = cpu.upload(&golden.f32("x")).expect("room");
        for (prefix, recipe, given) in recipes() {
            if !golden.has(&format!("{prefix}.rowwise_data")) {
                continue;
            }
            let scale = given.then(|| golden.number("delayed_scale") as f32);
            let source = Source::F32(source.clone());
            let tensor = quantize(&cpu, recipe, shape, Usage::BOTH, source, scale)
                .unwrap_or_else(|e| panic!("{name} {prefix}: {e}"));
            let found = compare(&golden, prefix, &tensor);
            assert!(
                found >= 2,
                "{name} {prefix}: only {found} golden tensors compared"
            );
            compared += found;
        }
    }
    assert!(compared > 900, "only {compared} golden tensors compared");
}

#[test]
fn each_usage_alone_gives_the_same_bytes() {
    let cpu = Cpu;
    let golden = Golden::open("96x160_normal_bf16");
    let shape = Shape::from_dims(&golden.shape("x")).expect("a matrix");
    let source = cpu.upload(&golden.f32("x")).expect("room");
    for (prefix, recipe, given) in recipes() {
        let scale = given.then(|| golden.number("delayed_scale") as f32);
        for o in Orientation::ALL {
            let source = Source::F32(source.clone());
            let tensor = quantize(&cpu, recipe, shape, o.usage(), source, scale).expect("a tensor");
            let found = part(&tensor, o, Part::Data).expect("data");
            let name = format!("{prefix}.{o}_data");
            assert_same(&found, golden.bytes(&name), &name);
        }
    }
}

#[test]
fn a_bf16_source_gives_the_same_bytes() {
    let cpu = Cpu;
    let golden = Golden::open("64x96_normal_bf16");
    let shape = Shape::from_dims(&golden.shape("x")).expect("a matrix");
    let values: Vec<half::bf16> = golden
        .f32("x")
        .into_iter()
        .map(half::bf16::from_f32)
        .collect();
    let source = cpu.upload(&values).expect("room");
    for (prefix, recipe, given) in recipes() {
        let scale = given.then(|| golden.number("delayed_scale") as f32);
        let source = Source::Bf16(source.clone());
        let tensor = quantize(&cpu, recipe, shape, Usage::BOTH, source, scale).expect("a tensor");
        assert!(compare(&golden, prefix, &tensor) >= 2);
    }
}
