//! Every operation of every instruction set against [`Portable`], bit for bit.

use half::bf16;
use lowp_format::Philox;

use super::{Isa, Kernel, LANES, Lanes, Line, Portable};

/// What every operation gives for three vectors of bits.
struct Everything([[u32; LANES]; 3]);

fn floats(bits: &[u32; LANES]) -> Line {
    bits.map(f32::from_bits)
}

impl Kernel for Everything {
    type Out = Vec<Vec<u32>>;

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) -> Vec<Vec<u32>> {
        let [x, y, z] = self.0.map(|bits| floats(&bits));
        let [a, b, c] = [l.load(&x), l.load(&y), l.load(&z)];
        let mut all = Vec::new();
        let mut keep = |value: L::F| {
            let mut line = [0.0; LANES];
            l.store(value, &mut line);
            // One bit pattern for every NaN: arithmetic may choose any. Of integers: the compiler
            // may give a float's NaN any bits.
            let canonical = |bits: u32| match bits & 0x7FFF_FFFF {
                0x7F80_0001.. => 0x7FC0_0000,
                _ => bits,
            };
            all.push(line.map(|x| canonical(x.to_bits())).to_vec());
        };
        keep(l.add(a, b));
        keep(l.mul(a, b));
        keep(l.div(a, b));
        keep(l.sqrt(a));
        keep(l.mul_add(a, b, c));
        keep(l.splat(x[3]));
        let number = |v| l.value(l.umin(l.bits(v), l.usplat(0x7F80_0000)));
        keep(l.min(number(a), number(b)));
        let acc = l.raise(l.splat(0.0), a);
        keep(acc);
        keep(l.raise(acc, b));
        keep(l.load_bf16(&x.map(|x| bf16::from_bits((x.to_bits() >> 16) as u16))));
        let [ua, ub, uc] = [l.bits(a), l.bits(b), l.bits(c)];
        let low = l.usplat(0x7FFF_FFFF);
        let mut codes = [0; LANES];
        for (code, x) in codes.iter_mut().zip(x) {
            *code = (x.to_bits() >> 3) as u8;
        }
        keep(l.lookup(ua, &y));
        keep(l.lookup(l.nibbles(codes.first_chunk().expect("eight bytes")), &y));
        let signed = l.signed(&codes);
        for bits in [
            ua,
            low,
            signed,
            l.and(ua, ub),
            l.or(ua, ub),
            l.uadd(ua, ub),
            l.usub(ua, ub),
            l.umin(ua, ub),
            l.shr::<1>(ua),
            l.shr::<20>(ua),
            l.shr::<28>(ua),
            l.shl::<23>(ua),
            l.umax(ua, ub),
            l.if_above(l.and(ua, low), l.and(ub, low), uc, ua),
        ] {
            // Compared as integers: halves are exact in binary32.
            keep(l.value(l.or(l.and(bits, l.usplat(0xFFFF)), l.usplat(0x3F80_0000))));
            keep(l.value(l.or(l.shr::<16>(bits), l.usplat(0x3F80_0000))));
        }
        let raised = [a, b, c, acc].map(|v| l.raise(l.splat(0.0), v));
        all.push(l.maxima(raised).map(f32::to_bits).to_vec());
        let mut bytes = [0; LANES];
        l.store_bytes(l.narrow(l.and(ua, l.usplat(0xFF))), &mut bytes);
        all.push(bytes.map(u32::from).to_vec());
        let bytes_of = |bits| l.and(bits, l.usplat(0xFF));
        let mut four = [0; 4 * LANES];
        let fours = [ua, ub, uc, l.shr::<8>(ua)].map(bytes_of);
        l.store_narrow(fours, &mut four);
        all.push(four.map(u32::from).to_vec());
        let any = |bound| u32::from(l.any_above(ua, bound));
        all.push(vec![
            any(0),
            any(x[0].to_bits()),
            any(0x7FFF_FFFF),
            any(u32::MAX),
        ]);
        let mut codes = [0; 2 * LANES];
        for (code, x) in codes.iter_mut().zip(x.iter().chain(&y)) {
            *code = (x.to_bits() & 0xF) as u8;
        }
        l.pack_nibbles(&codes, &mut bytes);
        all.push(bytes.map(u32::from).to_vec());
        let rows: [[u8; LANES]; LANES] = std::array::from_fn(|i| {
            let words = if i % 2 == 0 { x } else { y };
            words.map(|x| (x.to_bits().rotate_left(i as u32)) as u8)
        });
        for column in l.transpose_bytes(rows.each_ref()) {
            l.store_bytes(column, &mut bytes);
            all.push(bytes.map(u32::from).to_vec());
        }
        l.prefetch(usize::MAX / 2);
        all
    }
}

#[test]
fn every_operation_equals_the_portable_one() {
    let random = Philox::new(3, 1);
    let word = |n: u64, i: usize| {
        let [bits, kind, ..] = random.block(n * LANES as u64 + i as u64);
        match kind % 8 {
            0 => [
                0,
                1 << 31,
                0x7F80_0000,
                0xFF80_0000,
                0x7FC0_0000,
                1,
                0x0080_0000,
                0x7F7F_FFFF,
            ][bits as usize % 8],
            1..4 => (random.normal(n * 64 + i as u64)).to_bits(),
            _ => bits,
        }
    };
    for n in 0..2000 {
        let given: [[u32; LANES]; 3] =
            std::array::from_fn(|v| std::array::from_fn(|i| word(3 * n + v as u64, i)));
        let expected = Everything(given).run(Portable);
        for isa in Isa::all() {
            assert_eq!(isa.run(Everything(given)), expected, "{isa:?} {given:X?}");
        }
    }
}
