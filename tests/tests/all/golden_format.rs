//! Golden vectors of the codecs, scale rules, history update and swizzle: `lowp-format` alone.

use lowp_format::codec::{e2m1, e4m3, e5m2, e8m0};
use lowp_format::{
    AmaxAlgorithm, Axis, BufferSpec, Code, Form, FourOverSix, Orientation, Origin, PaddedForm,
    ScaleLayout, Shape, Usage, history, tensor_scale, two_level_encode_scale,
};
use lowp_tests::golden::{Golden, first_difference};

#[test]
fn casts() {
    let golden = Golden::open("casts");
    element_casts(&golden);
    decodes(&golden);
    stochastic_rounding(&golden);
    assert_eq!(golden.unread(), [""; 0]);
}

fn element_casts(golden: &Golden) {
    type Encode = fn(f32) -> u8;
    let x = golden.f32("x");
    let encoders: [(&str, Encode); 3] = [
        ("e4m3", e4m3::encode),
        ("e5m2", e5m2::encode),
        ("e2m1", e2m1::encode),
    ];
    for (name, encode) in encoders {
        let codes: Vec<u8> = x.iter().map(|&v| encode(v)).collect();
        let expected = golden.bytes(name);
        for i in 0..x.len() {
            assert_eq!(
                codes[i],
                expected[i],
                "{name} of {:e} ({:08X})",
                x[i],
                x[i].to_bits()
            );
        }
    }
    let codes: Vec<u8> = golden
        .f32("e8m0_in")
        .iter()
        .map(|&v| e8m0::encode_ceil(v))
        .collect();
    assert_eq!(codes, golden.bytes("e8m0"));
}

fn decodes(golden: &Golden) {
    type Decode = fn(u8) -> f32;
    let decoders: [(&str, Decode); 5] = [
        ("decode_e4m3", e4m3::decode),
        ("decode_e5m2", e5m2::decode),
        ("decode_e2m1", e2m1::decode),
        ("decode_e8m0", e8m0::decode),
        ("inverse_e8m0", e8m0::inverse),
    ];
    for (name, decode) in decoders {
        let expected = golden.f32(name);
        let values: Vec<f32> = (0..expected.len()).map(|c| decode(c as u8)).collect();
        assert_eq!(first_difference(&values, &expected), None, "{name}");
    }
}

fn stochastic_rounding(golden: &Golden) {
    let random = golden.bytes("sr_rbits");
    let codes: Vec<u8> = golden
        .f32("sr_in")
        .iter()
        .zip(random)
        .map(|(&v, &r)| e2m1::encode_stochastic(v, r))
        .collect();
    assert_eq!(codes, golden.bytes("sr_e2m1"));
}

#[test]
fn tensor_scales() {
    let golden = Golden::open("scales");
    let amax = golden.f32("amax");
    let epsilons = [("eps_0", 0.0), ("eps_2", 2.0)];
    for (format, code) in [("e4m3", Code::E4M3), ("e5m2", Code::E5M2)] {
        for (pow2_name, pow2) in [("pow2_0", false), ("pow2_1", true)] {
            for (eps_name, epsilon) in epsilons {
                let name = format!("{format}.{pow2_name}.{eps_name}");
                let scale: Vec<f32> = amax
                    .iter()
                    .map(|&a| tensor_scale(a, code, pow2, epsilon))
                    .collect();
                let scale_inv: Vec<f32> = scale.iter().map(|s| 1.0 / s).collect();
                let expected = golden.f32(&format!("{name}.scale"));
                assert_eq!(first_difference(&scale, &expected), None, "{name}.scale");
                let expected = golden.f32(&format!("{name}.scale_inv"));
                assert_eq!(
                    first_difference(&scale_inv, &expected),
                    None,
                    "{name}.scale_inv"
                );
            }
        }
    }
    let s_enc: Vec<f32> = amax
        .iter()
        .map(|&a| two_level_encode_scale(a, FourOverSix::Off))
        .collect();
    assert_eq!(first_difference(&s_enc, &golden.f32("nvfp4.s_enc")), None);
    assert_eq!(golden.unread(), [""; 0]);
}

#[test]
fn delayed_scaling_history() {
    let golden = Golden::open("delayed");
    for length in [1usize, 2, 5] {
        for (algorithm_name, algorithm) in [
            ("max", AmaxAlgorithm::Max),
            ("most_recent", AmaxAlgorithm::MostRecent),
        ] {
            for margin in [0, 1] {
                let name = |part: &str| format!("L{length}.{algorithm_name}.margin{margin}.{part}");
                let input = golden.f32(&name("history"));
                let scales = golden.f32(&name("scale"));
                let reduced = golden.f32(&name("reduced_amax"));
                let tensors = scales.len();
                for (suffix, use_reduced) in [("", false), ("_reduced", true)] {
                    let mut rolled = vec![0.0; input.len()];
                    let mut next = vec![0.0; tensors];
                    for t in 0..tensors {
                        let mut column: Vec<f32> =
                            (0..length).map(|l| input[l * tensors + t]).collect();
                        let agreed = use_reduced.then_some(reduced[t]);
                        next[t] = history(
                            &mut column,
                            scales[t],
                            agreed,
                            Code::E4M3,
                            algorithm,
                            margin,
                        );
                        for l in 0..length {
                            rolled[l * tensors + t] = column[l];
                        }
                    }
                    let expected = golden.f32(&name(&format!("history_out{suffix}")));
                    assert_eq!(
                        first_difference(&rolled, &expected),
                        None,
                        "{} {suffix}",
                        name("")
                    );
                    let expected = golden.f32(&name(&format!("scale_out{suffix}")));
                    assert_eq!(
                        first_difference(&next, &expected),
                        None,
                        "{} {suffix}",
                        name("")
                    );
                }
            }
        }
    }
    assert_eq!(golden.unread(), [""; 0]);
}

#[test]
fn swizzle() {
    let golden = Golden::open("swizzle");
    for (rows, cols) in [(128, 4), (130, 5), (1, 1), (256, 12)] {
        let name = format!("{rows}x{cols}");
        let shape = Shape::new(rows, cols * 32);
        let axes = [Axis::Rows, Axis::Cols];
        let spec = BufferSpec::block_scale(
            Usage::ROWWISE,
            Code::E8M0,
            axes,
            [1, 32],
            PaddedForm::TILES_128X4,
            Origin::Quantized,
        );
        let layout = |form| ScaleLayout::new(&spec, shape, Orientation::Rowwise, form).unwrap();
        let (from, to) = (layout(Form::Compact), layout(Form::Swizzled));
        let compact = golden.bytes(&format!("{name}.compact"));
        let mut swizzled = vec![0; to.bytes()];
        for i in 0..to.entries()[0] {
            for j in 0..to.entries()[1] {
                swizzled[to.offset(i, j)] = compact[to.source(&from, i, j)];
            }
        }
        assert_eq!(
            swizzled,
            golden.bytes(&format!("{name}.swizzled")),
            "{name}"
        );
    }
    assert_eq!(golden.unread(), [""; 0]);
}

/// Every file belongs to a test that compares all of its tensors.
#[test]
fn every_file_is_compared() {
    let files = ["adam", "casts", "delayed", "scales", "swizzle"];
    // golden_flat, golden_fsdp, golden_te, golden_recipes.
    let kinds = ["partial_", "fsdp_", "te_", "ext_"];
    for name in Golden::names() {
        let whole = name.starts_with(|c: char| c.is_ascii_digit());
        let known = files.contains(&&*name) || kinds.iter().any(|kind| name.starts_with(kind));
        assert!(whole || known, "{name}: say here which test compares it");
    }
}
