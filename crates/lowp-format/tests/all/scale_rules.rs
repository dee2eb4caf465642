//! The worked examples of docs/numerics.md, bit for bit.

use lowp_format::codec::{e2m1, e4m3, e5m2, e8m0};
use lowp_format::{
    AmaxAlgorithm, Code, FourOverSix, MxScale, chooses_four, delayed_numerator,
    four_over_six_error, four_over_six_rows, four_over_six_scales, hadamard_rows, hadamard16,
    history, rotate_rows, tensor_scale, two_level_block_scale, two_level_decode_factor,
    two_level_encode_scale, two_level_multiplier,
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

/// A margin halves or doubles, exactly.
#[test]
fn delayed_numerators_are_powers_of_two_apart() {
    for element in [Code::E4M3, Code::E5M2] {
        let largest = element.max_finite();
        assert_eq!(delayed_numerator(element, 0), largest);
        let (mut down, mut up) = (largest, largest);
        for margin in 1..=64 {
            (down, up) = (down / 2.0, up * 2.0);
            assert_eq!(delayed_numerator(element, margin), down, "{margin}");
            assert_eq!(delayed_numerator(element, -margin), up, "-{margin}");
        }
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
    let encode_scale = two_level_encode_scale(10.0, FourOverSix::Off);
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
        assert_eq!(two_level_encode_scale(amax, FourOverSix::Off), 1.0);
    }
    assert_eq!(two_level_encode_scale(1e-40, FourOverSix::Off), f32::MAX);
}

/// The row of section 7.2.
const ROW: [f32; 16] = [
    3.0, -1.5, 0.1, 0.26, 0.75, -0.25, 2.0, 2.49, -2.5, 1.0, 0.0, -0.0, 1.25, 1.75, -3.0, 0.6,
];

/// E2M1 codes of `values` times `multiplier`, two per byte.
fn packed(values: &[f32], multiplier: f32) -> Vec<u8> {
    let codes: Vec<u8> = values
        .iter()
        .map(|x| e2m1::encode(x * multiplier))
        .collect();
    codes
        .chunks(2)
        .map(|pair| e2m1::pack(pair[0], pair[1]))
        .collect()
}

/// The row of section 7.2, alone and in a 16x16 block whose amax is the tensor's.
#[test]
fn two_level_row() {
    let encode_scale = two_level_encode_scale(10.0, FourOverSix::Off);
    let packed = |block_amax| {
        let scale = two_level_block_scale(block_amax, encode_scale);
        (
            scale,
            packed(&ROW, two_level_multiplier(scale, encode_scale)),
        )
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

/// Section 7.4, and with the bound of section 20.1.
#[test]
fn two_level_decode() {
    for (choice, factor) in [
        (FourOverSix::Off, 0x39C3_0C31),
        (FourOverSix::Mae448, 0x39C3_0C31),
        (FourOverSix::Mse448, 0x39C3_0C31),
        (FourOverSix::Mae, 0x3A2A_AAAB),
        (FourOverSix::Mse, 0x3A2A_AAAB),
    ] {
        same(1.0 / choice.largest(), factor);
        assert_eq!(choice.largest(), 6.0 * choice.bound());
        for (scale, amax) in [(0x7E, 10.0), (0x70, 10.0), (0x5B, 0.3), (0x00, 10.0)] {
            let expected = (e4m3::decode(scale) * amax) * f(factor);
            same(
                two_level_decode_factor(scale, amax, choice),
                expected.to_bits(),
            );
        }
    }
}

/// Section 8: a block scale is a tensor scale rounded down to a power of two; sections 8.1 and 18 for what is special.
#[test]
fn block_scales_in_f32() {
    for (amax, scale, scale_inv) in [
        (3.0, 128f32.to_bits(), 0x3C00_0000),
        (1000.0, 0.25f32.to_bits(), 4f32.to_bits()),
        (1e-3, 262_144f32.to_bits(), 0x3680_0000),
        (0.0, 0x3F80_0000, 0x3F80_0000),
        (f32::INFINITY, 0x3F80_0000, 0x3F80_0000),
        // Below fp8_max / FLT_MAX.
        (1e-37, 0x7F00_0000, 0x0040_0000),
    ] {
        let found = tensor_scale(amax, Code::E4M3, true, 0.0);
        same(found, scale);
        same(1.0 / found, scale_inv);
    }
    assert_eq!(tensor_scale(1e-37, Code::E4M3, false, 0.0), f32::MAX);
    // Beside an infinite element values saturate, and it is the largest code.
    let x = [f32::INFINITY, 1e9, -500.0, f32::NAN];
    assert_eq!(x.map(e4m3::encode), [0x7E, 0x7E, 0xFE, 0x7F]);
}

/// Section 18: torchao's least amax gives its scales.
#[test]
fn scales_of_rows() {
    let scale = |amax: f32| tensor_scale(amax, Code::E4M3, false, 1e-12);
    for amax in [0.0, 1e-13, 1e-12, 3.0, 448.0, 1e30] {
        let torchao = (448.0 / f64::from(amax).max(f64::from(1e-12f32))) as f32;
        same(scale(amax), torchao.to_bits());
    }
}

/// Section 19.
#[test]
fn mx_scales_of_four_bits() {
    use MxScale::{Even, OcpFloor, Te};
    same(1.0 / 6.0, 0x3E2A_AAAB);
    let above6 = f(6f32.to_bits() + 1);
    for (amax, te, floor, even) in [
        (6.0, 0x7F, 0x7F, 0x7F),
        (above6, 0x80, 0x7F, 0x7F),
        (7.0, 0x80, 0x7F, 0x80),
        (0.0, 0x00, 0x00, 0x00),
        (f32::INFINITY, 0xFE, 0xFF, 0xFF),
        (f32::MAX, 0xFD, 0xFC, 0xFD),
        (1e-40, 0x00, 0x00, 0x00),
    ] {
        let found = [Te, OcpFloor, Even].map(|mode| mode.block_scale(amax, Code::E2M1));
        assert_eq!(found, [te, floor, even], "{amax:e}");
    }
    let row = [7.0, -3.0, 1.0, 0.3, -0.2, 5.0];
    for (mode, scale, bytes) in [
        (Te, 0x80, [0xB6, 0x01, 0x48]),
        (Even, 0x80, [0xB6, 0x01, 0x48]),
        (OcpFloor, 0x7F, [0xD7, 0x12, 0x68]),
    ] {
        let found = mode.block_scale(7.0, Code::E2M1);
        assert_eq!(found, scale);
        assert_eq!(packed(&row, e8m0::inverse(found)), bytes, "{mode:?}");
    }
}

/// Between 6 and 7 times a power of two `even` saturates, from 7 on it rounds up; `te` never clips.
#[test]
fn even_scales_round_the_amax_to_the_precision_of_the_elements() {
    for exponent in -100..100 {
        let power = f32::from_bits(((exponent + 127) as u32) << 23);
        let scale = |mode: MxScale, x: f32| mode.block_scale(x * power, Code::E2M1);
        let base = scale(MxScale::OcpFloor, 4.0);
        for (x, up) in [(4.0, 0), (6.0, 0), (6.99, 0), (7.0, 1), (7.99, 1)] {
            assert_eq!(scale(MxScale::Even, x), base + up, "{x} * 2^{exponent}");
            assert_eq!(scale(MxScale::OcpFloor, x), base);
            let te = scale(MxScale::Te, x);
            assert!(x * power * e8m0::inverse(te) <= 6.0);
        }
    }
}

/// The scale and the codes that four over six chooses for `values` under a tensor amax, and both errors.
fn chosen(values: &[f32], amax: f32, choice: FourOverSix) -> (u8, Vec<u8>, [f32; 2]) {
    let block_amax = values.iter().fold(0f32, |a, x| a.max(x.abs()));
    let encode_scale = two_level_encode_scale(amax, choice);
    let scales = four_over_six_scales(block_amax, encode_scale);
    let errors = scales.map(|scale| {
        let errors = values
            .iter()
            .map(|&x| four_over_six_error(x, scale, encode_scale, amax, choice));
        errors.fold(0.0, |sum, error| sum + error)
    });
    let scale = scales[usize::from(chooses_four(errors))];
    let multiplier = two_level_multiplier(scale, encode_scale);
    (scale, packed(values, multiplier), errors)
}

/// Section 20.1.
#[test]
fn four_over_six() {
    let encode_scale = two_level_encode_scale(10.0, FourOverSix::Mae);
    same(encode_scale, 0x4319_999A);
    assert_eq!(four_over_six_scales(3.0, encode_scale), [0x6A, 0x6E]);
    let (scale, bytes, errors) = chosen(&ROW, 10.0, FourOverSix::Mae);
    assert_eq!(errors.map(f32::to_bits), [0x3FF0_5F94, 0x4001_62FC]);
    assert_eq!(scale, 0x6A);
    assert_eq!(bytes, [0xD7, 0x10, 0x93, 0x66, 0x4E, 0x80, 0x54, 0x2F]);
    let (scale, bytes, errors) = chosen(&ROW, 10.0, FourOverSix::Mse);
    assert_eq!(errors.map(f32::to_bits), [0x3EF5_1D14, 0x3ED1_9D0D]);
    assert_eq!(scale, 0x6E);
    assert_eq!(bytes, [0xC6, 0x10, 0x92, 0x55, 0x3D, 0x80, 0x43, 0x2E]);
}

/// An equal or unordered error keeps 6; of zeros and of infinite amaxes nothing is chosen.
#[test]
fn four_is_chosen_for_less_error_alone() {
    assert!(chooses_four([1.0, 0.5]));
    for errors in [
        [1.0, 1.0],
        [0.0, 0.0],
        [0.5, 1.0],
        [f32::NAN, 0.0],
        [0.0, f32::NAN],
    ] {
        assert!(!chooses_four(errors), "{errors:?}");
    }
    for choice in [FourOverSix::Mae, FourOverSix::Mse448] {
        let zeros = chosen(&[0.0; 16], 3.0, choice);
        assert_eq!(zeros, (0, vec![0; 8], [0.0; 2]));
        // With the bound of 448 the scale for 4 of the tensor's own amax would be above it: it saturates.
        let encode_scale = two_level_encode_scale(5.0, choice);
        let [six, four] = four_over_six_scales(5.0, encode_scale).map(e4m3::decode);
        assert_eq!(six, choice.bound());
        assert_eq!(four, (1.5 * choice.bound()).min(448.0));
    }
}

/// Rows are added up in a tree, and not one after the other.
#[test]
fn errors_of_a_square_block_are_a_tree_of_its_rows() {
    let mut rows = [0f32; 16];
    rows[0] = 16_777_216.0;
    rows[1..].fill(1.0);
    let [even, odd] = [[0, 8, 4, 12, 2, 10, 6, 14], [1, 9, 5, 13, 3, 11, 7, 15]].map(|order| {
        let of = |i: usize| rows[order[i]];
        ((of(0) + of(1)) + (of(2) + of(3))) + ((of(4) + of(5)) + (of(6) + of(7)))
    });
    same(four_over_six_rows(rows), (even + odd).to_bits());
    assert_ne!(
        four_over_six_rows(rows),
        rows.iter().fold(0.0, |a, x| a + x)
    );
    // Rows that are missing count nothing.
    let mut three = [0f32; 16];
    three[..3].copy_from_slice(&[0.25, 0.5, 4.0]);
    assert_eq!(four_over_six_rows(three), 4.75);
}

/// Section 15.
#[test]
fn hadamard_of_one_to_sixteen() {
    let mut x: [f32; 16] = std::array::from_fn(|i| i as f32 + 1.0);
    let expected = [
        -15.5, -7.5, 7.5, -0.5, 7.5, -0.5, -15.5, 8.5, 8.5, 16.5, 1.5, 1.5, 1.5, -2.5, 10.5, -17.5,
    ];
    let mut column = x;
    hadamard16(&mut x);
    assert_eq!(x, expected);
    hadamard_rows(&mut column, 1);
    assert_eq!(column, expected);
}

/// It is the matrix of its definition, column by column, and orthogonal; rows after the last whole group stay where they are.
#[test]
fn hadamard_is_a_matrix_of_whole_groups() {
    let signs = 0xD7E8u32;
    for j in 0..16usize {
        let mut unit = [0f32; 16];
        unit[j] = 1.0;
        hadamard16(&mut unit);
        for (i, x) in unit.into_iter().enumerate() {
            let odd = (i & j).count_ones() + (signs >> j & 1);
            assert_eq!(x, if odd % 2 == 1 { -0.25 } else { 0.25 });
        }
    }
    let value = |i: usize| (i * 37 % 101) as f32 / 8.0 - 6.0;
    for (rows, cols) in [(0, 3), (15, 2), (16, 3), (33, 5), (48, 1), (16, 0)] {
        let source: Vec<f32> = (0..rows * cols).map(value).collect();
        let mut found = source.clone();
        rotate_rows(&mut found, cols);
        for col in 0..cols {
            let column = |values: &[f32]| -> Vec<f32> {
                values.iter().skip(col).step_by(cols).copied().collect()
            };
            let (before, after) = (column(&source), column(&found));
            for (group, before) in before.as_chunks::<16>().0.iter().enumerate() {
                let mut expected = *before;
                hadamard16(&mut expected);
                assert_eq!(after[16 * group..][..16], expected);
                let norm = |x: &[f32]| x.iter().map(|x| x * x).sum::<f32>();
                assert!((norm(before) - norm(&expected)).abs() < 1e-3 * norm(before));
            }
            let whole = rows / 16 * 16;
            assert_eq!(after[whole..], before[whole..]);
        }
        let mut rounded = source;
        hadamard_rows(&mut rounded, cols);
        let expected: Vec<f32> = found
            .iter()
            .map(|&x| half::bf16::from_f32(x).to_f32())
            .collect();
        assert_eq!(rounded, expected);
    }
    // An infinity makes its group infinite.
    let mut x = [1f32; 16];
    x[5] = f32::INFINITY;
    hadamard16(&mut x);
    assert!(x.iter().all(|x| x.is_infinite()));
}
