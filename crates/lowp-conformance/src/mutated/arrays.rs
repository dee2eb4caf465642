//! Mutated jobs on bytes: transposes, conversions between forms, interleaves.

use lowp_format::codec::e2m1;
use lowp_format::{Form, Orientation, ScaleLayout};

use super::vectors::ElementsOrZero;
use super::*;
use lowp_kernels::reference::in_form;
use lowp_kernels::{InterleaveJob, PieceRows, RepackJob, TransposeJob};

pub fn transpose_jobs<B: Fenced>(rig: &Rig<B>) {
    all::<B, TransposeJob<B>>(rig);
}

pub fn repack_jobs<B: Fenced>(rig: &Rig<B>) {
    all::<B, RepackJob<B>>(rig);
}

pub fn interleave_jobs<B: Fenced>(rig: &Rig<B>) {
    all::<B, InterleaveJob<B>>(rig);
}

/// Bytes of `rows` rows of `entries`, where they are few.
fn matrix(code: Code, rows: usize, entries: usize) -> Option<usize> {
    small(&[rows, code.bytes(small(&[entries])?)])
}

impl<B: Fenced> Mutate<B> for TransposeJob<B> {
    const FIELDS: &'static [&'static str] = &[
        "code",
        "entries[0]",
        "entries[1]",
        "from",
        "to",
        "to = from",
    ];

    fn good(choices: &mut Choices<'_, B>) -> Self {
        let entries = [choices.below(160), choices.below(300)];
        let entries = choices.pick(&[entries, [128, 256]]);
        let code = choices.pick(&[Code::E2M1, Code::E8M0, Code::Bf16, Code::F32]);
        let [outer, inner] = entries;
        TransposeJob {
            code,
            entries,
            from: choices.bytes(outer * code.bytes(inner)),
            to: choices.bytes(inner * code.bytes(outer)),
        }
    }

    fn mutate(&mut self, field: &str, choices: &mut Choices<'_, B>) {
        let TransposeJob {
            code,
            entries,
            from,
            to,
        } = self;
        match field {
            "code" => *code = choices.pick(&Code::ALL),
            "entries[0]" => entries[0] = choices.size(entries[0]),
            "entries[1]" => entries[1] = choices.size(entries[1]),
            "from" => *from = choices.resized(from),
            "to" => *to = choices.resized(to),
            _ => *to = from.clone(),
        }
    }

    fn resize(&mut self, choices: &mut Choices<'_, B>) {
        let [outer, inner] = self.entries;
        let lengths = [(outer, inner), (inner, outer)].map(|(a, b)| matrix(self.code, a, b));
        if let [Some(from), Some(to)] = lengths {
            self.from = choices.bytes(from);
            self.to = choices.bytes(to);
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

/// A layout that a caller may make of a mutated description.
fn layout<B: Fenced>(
    choices: &mut Choices<'_, B>,
    mutated: bool,
    code: Code,
    shape: Shape,
) -> ScaleLayout {
    let good = |choices: &mut Choices<'_, B>| {
        let usage = choices.pick(&[Usage::ROWWISE, Usage::COLUMNWISE, Usage::BOTH]);
        let block = choices.pick(&[[1, 32], [32, 1], [32, 32], [16, 16], [1, 1], [5, 3]]);
        let axes = choices.pick(&[ROW_MAJOR, TRANSPOSED]);
        let pad = choices.pick(&[PaddedForm::NONE, PaddedForm::TILES_128X4]);
        BufferSpec::block_scale(usage, code, axes, block, pad, Origin::Quantized)
    };
    loop {
        let (mut spec, mut shape) = (good(choices), shape);
        if mutated {
            match choices.below(6) {
                0 => spec.tile[0] = choices.size(spec.tile[0]),
                1 => spec.axes = choices.pick(&[[Axis::Rows; 2], [Axis::Cols; 2], TRANSPOSED]),
                2 => spec.padded.outer = choices.size(spec.padded.outer),
                3 => spec.padded.block = choices.size(spec.padded.block),
                4 => spec.key.part = choices.pick(&[Part::Data, Part::DecodeScale, Part::Amax]),
                _ => shape.rows = choices.size(shape.rows),
            }
        }
        let orientation = choices.pick(&Orientation::ALL);
        let form = choices.pick(&Form::ALL);
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

impl<B: Fenced> Mutate<B> for RepackJob<B> {
    const FIELDS: &'static [&'static str] =
        &["from_layout", "to_layout", "from", "to", "to = from"];

    fn good(choices: &mut Choices<'_, B>) -> Self {
        let shape = Shape::new(choices.below(300), choices.below(200));
        let code = choices.pick(&[Code::E8M0, Code::E4M3, Code::F32, Code::E2M1]);
        // Of one spec: every form has an entry for every element.
        let mut to_layout = layout(choices, false, code, shape);
        let mut from_layout = layout(choices, false, code, shape);
        while from_layout.tile() != to_layout.tile() || from_layout.bytes() > SMALL {
            from_layout = layout(choices, false, code, shape);
            to_layout = layout(choices, false, code, shape);
        }
        RepackJob {
            from_layout,
            to_layout,
            from: choices.bytes(from_layout.bytes()),
            to: choices.bytes(to_layout.bytes()),
        }
    }

    fn mutate(&mut self, field: &str, choices: &mut Choices<'_, B>) {
        let RepackJob {
            from_layout,
            to_layout,
            from,
            to,
        } = self;
        let code = choices.pick(&[from_layout.code(), from_layout.code(), Code::Bf16]);
        let shape = Shape::new(choices.below(300), choices.below(200));
        match field {
            "from_layout" => *from_layout = layout(choices, true, code, shape),
            "to_layout" => *to_layout = layout(choices, true, code, shape),
            "from" => {
                let len = choices.length(from_layout.bytes().min(SMALL));
                *from = choices.bytes(len);
            }
            "to" => {
                let len = choices.length(to_layout.bytes().min(SMALL));
                *to = choices.bytes(len);
            }
            _ => *to = from.clone(),
        }
    }

    fn resize(&mut self, choices: &mut Choices<'_, B>) {
        let lengths = [&self.from_layout, &self.to_layout].map(|l| small(&[l.bytes()]));
        if let [Some(from), Some(to)] = lengths {
            self.from = choices.bytes(from);
            self.to = choices.bytes(to);
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

impl<B: Fenced> Mutate<B> for InterleaveJob<B> {
    const FIELDS: &'static [&'static str] = &[
        "outer",
        "pieces[i].start",
        "pieces[i].width",
        "pieces[i].pitch",
        "pieces",
        "from",
        "to",
        "to = from",
    ];

    fn good(choices: &mut Choices<'_, B>) -> Self {
        let outer = choices.below(40);
        let width = |choices: &mut Choices<'_, B>| choices.pick(&[0, 1, 7, 16, 32]);
        let widths: Vec<usize> = (0..choices.below(5)).map(|_| width(choices)).collect();
        let all = outer * widths.iter().sum::<usize>();
        InterleaveJob {
            outer,
            pieces: PieceRows::dense(outer, widths),
            from: choices.bytes(all),
            to: choices.bytes(all),
        }
    }

    fn mutate(&mut self, field: &str, choices: &mut Choices<'_, B>) {
        let InterleaveJob {
            outer,
            pieces,
            from,
            to,
        } = self;
        let at = choices.below(pieces.len());
        match (field, pieces.get_mut(at)) {
            ("outer", _) => *outer = choices.size(*outer),
            ("pieces[i].start", Some(piece)) => piece.start = choices.size(piece.start),
            ("pieces[i].width", Some(piece)) => piece.width = choices.size(piece.width),
            ("pieces[i].pitch", Some(piece)) => piece.pitch = choices.size(piece.pitch),
            ("pieces[i].start" | "pieces[i].width" | "pieces[i].pitch", None) => {}
            ("pieces", _) => {
                let width = choices.size(8);
                pieces.extend(PieceRows::dense(1, [width]));
            }
            ("from", _) => *from = choices.resized(from),
            ("to", _) => *to = choices.resized(to),
            _ => *to = from.clone(),
        }
    }

    fn resize(&mut self, choices: &mut Choices<'_, B>) {
        let mut widths = self.pieces.iter().map(|piece| piece.width);
        let width = widths.try_fold(0usize, usize::checked_add);
        let all = width.map(|width| Shape::new(self.outer, width));
        if let Some(all) = all {
            let all = all.elements_or_zero();
            self.from = choices.bytes(all);
            self.to = choices.bytes(all);
        }
    }

    fn work(self) -> Work<B> {
        Work::Interleave(vec![self])
    }

    fn expected(&self, rig: &Rig<B>) -> Vec<Output<B>> {
        let from = rig.content::<u8>(&self.from);
        let mut to = Vec::new();
        let empty = self.pieces.iter().all(|piece| piece.width == 0);
        let rows = if empty { 0 } else { self.outer };
        for row in 0..rows {
            for piece in self.pieces.iter().filter(|piece| piece.width > 0) {
                to.extend(&from[piece.start + row * piece.pitch..][..piece.width]);
            }
        }
        vec![Output::Bytes("result", self.to.clone(), to)]
    }
}
