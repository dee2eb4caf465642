//! The worked examples of docs/numerics.md, bit for bit.

use lowp_format::codec::{e2m1, e4m3, e5m2, e8m0};
use lowp_format::{
    AmaxAlgorithm, Code, MxScale, history, tensor_scale, two_level_block_scale,
    two_level_decode_factor, two_level_encode_scale, two_level_multiplier,
};

fn f(bits: u32) -> f32 {
    f32::from_bits(bits)
}

#[track_caller]
fn same(found: f32, bits: u32) {
    assert_eq!(found.to_bits(), bits, "{found:e} is not {:e}", f(bits));
}

/// Section 1.4.
#[test]
fn e8m0_table() {
    for (code, decoded, inverse) in [
        (0x00, 0x0040_0000, 0x7F00_0000),
        (0x01, 0x0080_0000, 0x7E80_0000),
        (0x7F, 0x3F80_0000, 0x3F80_0000),
        (0x80, 0x4000_0000, 0x3F00_0000),
        (0xFE, 0x7F00_0000, 0x0040_0000),
    ] {
        same(e8m0::decode(code), decoded);
        same(e8m0::inverse(code), inverse);
    }
    for (v, code) in [
        (0x3F80_0000, 0x7F),
        (0x3F80_0001, 0x80),
        (0x0040_0000, 0x00),
        (0x0040_0001, 0x01),
        (0x7F7F_FFFF, 0xFE),
    ] {
        assert_eq!(e8m0::encode_ceil(f(v)), code, "{v:08X}");
    }
}

/// Section 4.2.
#[test]
fn delayed_scaling() {
    use AmaxAlgorithm::{Max, MostRecent};
    let roll = |window: &[f32], reduced, algorithm, margin| {
        let mut window = window.to_vec();
        let scale = history(&mut window, 7.0, reduced, Code::E4M3, algorithm, margin);
        (window, scale)
    };
    let window = [2.0, 5.0, 1.0];
    assert_eq!(
        roll(&window, None, Max, 0),
        (vec![0.0, 1.0, 2.0], 448.0 / 5.0)
    );
    assert_eq!(
        roll(&window, None, MostRecent, 0),
        (vec![0.0, 1.0, 2.0], 224.0)
    );
    assert_eq!(
        roll(&window, None, Max, 3),
        (vec![0.0, 1.0, 2.0], 56.0 / 5.0)
    );
    // What was reduced replaces slot 0, unless it is 0.
    assert_eq!(
        roll(&window, Some(8.0), Max, 0),
        (vec![0.0, 1.0, 8.0], 56.0)
    );
    assert_eq!(
        roll(&window, Some(0.0), Max, 0),
        roll(&window, None, Max, 0)
    );
    assert_eq!(roll(&[2.0], None, Max, 0), (vec![0.0], 224.0));
    // A step of zeros changes nothing; one with infinity rolls and keeps the scale.
    assert_eq!(roll(&[0.0, 5.0], None, Max, 0), (vec![0.0, 5.0], 7.0));
    let infinite = [f32::INFINITY, 5.0];
    assert_eq!(
        roll(&infinite, None, Max, 0),
        (vec![0.0, f32::INFINITY], 7.0)
    );
    assert_eq!(roll(&[1e-38], None, Max, 0).1, f32::MAX);
    // So does one whose only amax is NaN.
    let (window, scale) = roll(&[f32::NAN, 0.0], None, Max, 0);
    assert!(window[1].is_nan());
    assert_eq!(scale, 7.0);
}

/// Section 5.2.
#[test]
fn current_scaling() {
    for (amax, pow2, scale, scale_inv) in [
        (3.0, false, 0x4315_5555, 0x3BDB_6DB7),
        (3.0, true, 0x4300_0000, 0x3C00_0000),
        (0.1, false, 0x458C_0000, 0x396A_0EA1),
        (1e-38, false, 0x7F7F_FFFF, 0x0020_0000),
        (1e-38, true, 0x7F00_0000, 0x0040_0000),
        (0.0, false, 0x3F80_0000, 0x3F80_0000),
        (0.0, true, 0x3F80_0000, 0x3F80_0000),
        (f32::INFINITY, false, 0x3F80_0000, 0x3F80_0000),
        (f32::NAN, false, 0x3F80_0000, 0x3F80_0000),
    ] {
        let found = tensor_scale(amax, Code::E4M3, pow2, 0.0);
        same(found, scale);
        same(1.0 / found, scale_inv);
    }
    assert_eq!(
        tensor_scale(1.0, Code::E4M3, false, 2.0),
        224.0,
        "epsilon bounds the amax"
    );
    assert_eq!(tensor_scale(0.0, Code::E4M3, false, 2.0), 224.0);

    let x = [3.0, -1.0, 0.02, 0.0001, -3.0];
    let scale = tensor_scale(3.0, Code::E4M3, false, 0.0);
    assert_eq!(
        x.map(|x| e4m3::encode(x * scale)),
        [0x7E, 0xF1, 0x44, 0x08, 0xFE]
    );
    let scale = tensor_scale(3.0, Code::E5M2, false, 0.0);
    same(scale, 0x4695_5555);
    assert_eq!(
        x.map(|x| e5m2::encode(x * scale)),
        [0x7B, 0xF5, 0x5E, 0x40, 0xFB]
    );
}

/// Section 6.1.
#[test]
fn mx_scales() {
    for (amax, up, floor, up_e5m2) in [
        (1.0, 0x77, 0x77, 0x70),
        (448.0, 0x7F, 0x7F, 0x78),
        (f(0x43E0_0001), 0x80, 0x7F, 0x79),
        (450.0, 0x80, 0x7F, 0x79),
        (512.0, 0x80, 0x80, 0x79),
        (3e38, 0xF7, 0xF6, 0xF0),
        (1e-40, 0x00, 0x00, 0x00),
        (0.0, 0x00, 0x00, 0x00),
        (f32::INFINITY, 0xFE, 0xFF, 0xFE),
    ] {
        assert_eq!(MxScale::Te.block_scale(amax, Code::E4M3), up, "{amax:e}");
        assert_eq!(
            MxScale::OcpFloor.block_scale(amax, Code::E4M3),
            floor,
            "{amax:e}"
        );
        assert_eq!(
            MxScale::Te.block_scale(amax, Code::E5M2),
            up_e5m2,
            "{amax:e}"
        );
    }
    let block = [450.0, -100.0, 1.0, 0.01, 0.0];
    let codes = |rule: MxScale| {
        let scale = e8m0::inverse(rule.block_scale(450.0, Code::E4M3));
        block.map(|x: f32| e4m3::encode(x * scale))
    };
    assert_eq!(codes(MxScale::Te), [0x76, 0xE4, 0x30, 0x03, 0x00]);
    assert_eq!(codes(MxScale::OcpFloor), [0x7E, 0xEC, 0x38, 0x05, 0x00]);
}

/// Section 7.1 and 7.2.
#[test]
fn two_level_scales() {
    let encode_scale = two_level_encode_scale(10.0);
    same(encode_scale, 0x4386_6666);
    same(1.0 / encode_scale, 0x3B73_CF3E);
    for (block_amax, scale, value, multiplier) in [
        (10.0, 0x7E, 448.0, 0x3F19_9999),
        (3.0, 0x70, 128.0, 0x4006_6666),
        (0.5, 0x5B, 22.0, 0x4143_7DAB),
        (0.001, 0x13, 0.042_968_75, 0x45C3_7DAB),
        (1e-6, 0x00, 0.0, 0x7F7F_FFFF),
    ] {
        let found = two_level_block_scale(block_amax, encode_scale);
        assert_eq!(found, scale, "{block_amax}");
        assert_eq!(e4m3::decode(found), value);
        same(two_level_multiplier(found, encode_scale), multiplier);
    }
    for amax in [0.0, f32::INFINITY] {
        assert_eq!(two_level_encode_scale(amax), 1.0);
    }
    assert_eq!(two_level_encode_scale(1e-40), f32::MAX);
}

/// The row of section 7.2, alone and in a 16x16 block whose amax is the tensor's.
#[test]
fn two_level_row() {
    let row = [
        3.0, -1.5, 0.1, 0.26, 0.75, -0.25, 2.0, 2.49, -2.5, 1.0, 0.0, -0.0, 1.25, 1.75, -3.0, 0.6,
    ];
    let encode_scale = two_level_encode_scale(10.0);
    let packed = |block_amax| {
        let scale = two_level_block_scale(block_amax, encode_scale);
        let multiplier = two_level_multiplier(scale, encode_scale);
        let codes = row.map(|x: f32| e2m1::encode(x * multiplier));
        let bytes: Vec<u8> = codes
            .chunks(2)
            .map(|pair| e2m1::pack(pair[0], pair[1]))
            .collect();
        (scale, bytes)
    };
    assert_eq!(
        packed(3.0),
        (0x70, vec![0xD7, 0x10, 0x93, 0x76, 0x4F, 0x80, 0x65, 0x3F])
    );
    assert_eq!(
        packed(10.0),
        (0x7E, vec![0xA4, 0x00, 0x81, 0x32, 0x1B, 0x80, 0x21, 0x1C])
    );
}

/// Section 7.4.
#[test]
fn two_level_decode() {
    same(1.0 / 2688.0, 0x39C3_0C31);
    for (scale, amax) in [(0x7E, 10.0), (0x70, 10.0), (0x5B, 0.3), (0x00, 10.0)] {
        let expected = (e4m3::decode(scale) * amax) * f(0x39C3_0C31);
        same(two_level_decode_factor(scale, amax), expected.to_bits());
    }
}
