//! Bent jobs on bytes: transposes, conversions between forms, interleaves.

use lowp_format::codec::e2m1;
use lowp_format::{Form, Orientation, ScaleLayout};

use super::vectors::ElementsOrZero;
use super::*;
use crate::reference::in_form;
use crate::{InterleaveJob, RepackJob, TransposeJob};

pub(in crate::conformance) fn transpose_jobs<B: Fenced>(rig: &Rig<B>) {
    all::<B, TransposeJob<B>>(rig);
}

pub(in crate::conformance) fn repack_jobs<B: Fenced>(rig: &Rig<B>) {
    all::<B, RepackJob<B>>(rig);
}

pub(in crate::conformance) fn interleave_jobs<B: Fenced>(rig: &Rig<B>) {
    all::<B, InterleaveJob<B>>(rig);
}

/// Bytes of `rows` rows of `entries`, where they are few.
fn matrix(code: Code, rows: usize, entries: usize) -> Option<usize> {
    small(&[rows, code.bytes(small(&[entries])?)])
}

impl<B: Fenced> Bent<B> for TransposeJob<B> {
    fn good(hand: &mut Hand<'_, B>) -> Self {
        let entries = [hand.below(160), hand.below(300)];
        let entries = hand.pick(&[entries, [128, 256]]);
        let code = hand.pick(&[Code::E2M1, Code::E8M0, Code::Bf16, Code::F32]);
        let [outer, inner] = entries;
        TransposeJob {
            code,
            entries,
            from: hand.bytes(outer * code.bytes(inner)),
            to: hand.bytes(inner * code.bytes(outer)),
        }
    }

    fn bend(&mut self, pick: usize, hand: &mut Hand<'_, B>) {
        let TransposeJob {
            code,
            entries,
            from,
            to,
        } = self;
        match pick % 6 {
            0 => *code = hand.pick(&Code::ALL),
            1 => entries[0] = hand.size(entries[0]),
            2 => entries[1] = hand.size(entries[1]),
            3 => {
                let len = hand.length(hand.rig.backend.len::<u8>(from));
                *from = hand.bytes(len);
            }
            4 => {
                let len = hand.length(hand.rig.backend.len::<u8>(to));
                *to = hand.bytes(len);
            }
            _ => *to = from.clone(),
        }
    }

    fn fit(&mut self, hand: &mut Hand<'_, B>) {
        let [outer, inner] = self.entries;
        let lengths = [(outer, inner), (inner, outer)].map(|(a, b)| matrix(self.code, a, b));
        if let [Some(from), Some(to)] = lengths {
            self.from = hand.bytes(from);
            self.to = hand.bytes(to);
        }
    }

    fn work(self) -> Work<B> {
        Work::Transpose(vec![self])
    }

    fn expected(&self, rig: &Rig<B>) -> Vec<Output<B>> {
        let from = rig.content::<u8>(&self.from);
        let mut to = vec![0u8; rig.backend.len::<u8>(&self.to)];
        let [outer, inner] = self.entries;
        if !to.is_empty() {
            let pitches = [self.code.bytes(inner), self.code.bytes(outer)];
            let size = self.code.bits() / 8;
            for (i, j) in (0..outer).flat_map(|i| (0..inner).map(move |j| (i, j))) {
                let (from, to) = (&from[i * pitches[0]..], &mut to[j * pitches[1]..]);
                if size == 0 {
                    e2m1::set_nibble(to, i, e2m1::nibble(from, j));
                } else {
                    to[i * size..][..size].copy_from_slice(&from[j * size..][..size]);
                }
            }
        }
        vec![Output::Bytes("transpose", self.to.clone(), to)]
    }
}

/// A layout that a caller may make of a bent description.
fn layout<B: Fenced>(hand: &mut Hand<'_, B>, bent: bool, code: Code, shape: Shape) -> ScaleLayout {
    let good = |hand: &mut Hand<'_, B>| {
        let usage = hand.pick(&[Usage::ROWWISE, Usage::COLUMNWISE, Usage::BOTH]);
        let block = hand.pick(&[[1, 32], [32, 1], [32, 32], [16, 16], [1, 1], [5, 3]]);
        let axes = hand.pick(&[ROW_MAJOR, TRANSPOSED]);
        let pad = hand.pick(&[PaddedForm::NONE, PaddedForm::TILES_128X4]);
        BufferSpec::block_scale(usage, code, axes, block, pad, Origin::Quantized)
    };
    loop {
        let (mut spec, mut shape) = (good(hand), shape);
        if bent {
            match hand.below(6) {
                0 => spec.tile[0] = hand.size(spec.tile[0]),
                1 => spec.axes = hand.pick(&[[Axis::Rows; 2], [Axis::Cols; 2], TRANSPOSED]),
                2 => spec.padded.outer = hand.size(spec.padded.outer),
                3 => spec.padded.block = hand.size(spec.padded.block),
                4 => spec.key.part = hand.pick(&[Part::Data, Part::DecodeScale, Part::TensorAmax]),
                _ => shape.rows = hand.size(shape.rows),
            }
        }
        let orientation = hand.pick(&Orientation::ALL);
        let form = hand.pick(&Form::ALL);
        match ScaleLayout::new(&spec, shape, orientation, form) {
            Ok(layout) => {
                let [entries, padded] = [layout.entries(), layout.padded()];
                assert!(
                    entries[0] <= padded[0] && entries[1] <= padded[1],
                    "{layout:?}"
                );
                let tiles = [padded[0] % 128, padded[1] % 4] == [0, 0];
                assert!(tiles || form != Form::Swizzled, "{layout:?}");
                return layout;
            }
            Err(error) => {
                let ours = matches!(
                    error,
                    FormatError::NoSuchBuffer { .. }
                        | FormatError::NoSuchForm { .. }
                        | FormatError::TooLarge { .. }
                );
                assert!(ours, "{error}");
            }
        }
    }
}

impl<B: Fenced> Bent<B> for RepackJob<B> {
    fn good(hand: &mut Hand<'_, B>) -> Self {
        let shape = Shape::new(hand.below(300), hand.below(200));
        let code = hand.pick(&[Code::E8M0, Code::E4M3, Code::F32, Code::E2M1]);
        // Of one spec: every form has an entry for every element.
        let mut to_layout = layout(hand, false, code, shape);
        let mut from_layout = layout(hand, false, code, shape);
        while from_layout.tile() != to_layout.tile() || from_layout.bytes() > SMALL {
            from_layout = layout(hand, false, code, shape);
            to_layout = layout(hand, false, code, shape);
        }
        RepackJob {
            from_layout,
            to_layout,
            from: hand.bytes(from_layout.bytes()),
            to: hand.bytes(to_layout.bytes()),
        }
    }

    fn bend(&mut self, pick: usize, hand: &mut Hand<'_, B>) {
        let RepackJob {
            from_layout,
            to_layout,
            from,
            to,
        } = self;
        let code = hand.pick(&[from_layout.code(), from_layout.code(), Code::Bf16]);
        let shape = Shape::new(hand.below(300), hand.below(200));
        match pick % 5 {
            0 => *from_layout = layout(hand, true, code, shape),
            1 => *to_layout = layout(hand, true, code, shape),
            2 => {
                let len = hand.length(from_layout.bytes().min(SMALL));
                *from = hand.bytes(len);
            }
            3 => {
                let len = hand.length(to_layout.bytes().min(SMALL));
                *to = hand.bytes(len);
            }
            _ => *to = from.clone(),
        }
    }

    fn fit(&mut self, hand: &mut Hand<'_, B>) {
        let lengths = [&self.from_layout, &self.to_layout].map(|l| small(&[l.bytes()]));
        if let [Some(from), Some(to)] = lengths {
            self.from = hand.bytes(from);
            self.to = hand.bytes(to);
        }
    }

    fn work(self) -> Work<B> {
        Work::Repack(vec![self])
    }

    fn expected(&self, rig: &Rig<B>) -> Vec<Output<B>> {
        let from = rig.content::<u8>(&self.from);
        let to = in_form(&self.from_layout, &self.to_layout, &from);
        vec![Output::Bytes("result", self.to.clone(), to)]
    }
}

impl<B: Fenced> Bent<B> for InterleaveJob<B> {
    fn good(hand: &mut Hand<'_, B>) -> Self {
        let outer = hand.below(40);
        let width = |hand: &mut Hand<'_, B>| hand.pick(&[0, 1, 7, 16, 32]);
        let widths: Vec<usize> = (0..hand.below(5)).map(|_| width(hand)).collect();
        let all = outer * widths.iter().sum::<usize>();
        InterleaveJob {
            outer,
            widths,
            from: hand.bytes(all),
            to: hand.bytes(all),
        }
    }

    fn bend(&mut self, pick: usize, hand: &mut Hand<'_, B>) {
        let InterleaveJob {
            outer,
            widths,
            from,
            to,
        } = self;
        let at = hand.below(widths.len());
        match pick % 6 {
            0 => *outer = hand.size(*outer),
            1 => {
                if let Some(width) = widths.get_mut(at) {
                    *width = hand.size(*width);
                }
            }
            2 => {
                let width = hand.size(8);
                widths.push(width);
            }
            3 => {
                let len = hand.length(hand.rig.backend.len::<u8>(from));
                *from = hand.bytes(len);
            }
            4 => {
                let len = hand.length(hand.rig.backend.len::<u8>(to));
                *to = hand.bytes(len);
            }
            _ => *to = from.clone(),
        }
    }

    fn fit(&mut self, hand: &mut Hand<'_, B>) {
        let width = self
            .widths
            .iter()
            .try_fold(0usize, |a, &b| a.checked_add(b));
        let all = width.map(|width| Shape::new(self.outer, width));
        if let Some(all) = all {
            let all = all.elements_or_zero();
            self.from = hand.bytes(all);
            self.to = hand.bytes(all);
        }
    }

    fn work(self) -> Work<B> {
        Work::Interleave(vec![self])
    }

    fn expected(&self, rig: &Rig<B>) -> Vec<Output<B>> {
        let from = rig.content::<u8>(&self.from);
        let mut to = Vec::new();
        let rows = if from.is_empty() { 0 } else { self.outer };
        for row in 0..rows {
            let mut piece = 0;
            for &width in &self.widths {
                to.extend(&from[piece + row * width..][..width]);
                piece += self.outer * width;
            }
        }
        vec![Output::Bytes("result", self.to.clone(), to)]
    }
}
