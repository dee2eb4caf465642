//! Mutated updates, alone and with an encode.

use super::encode::{encoded, resize_targets};
use super::vectors::raised;
use super::*;
use lowp_format::codec::remainder;
use lowp_kernels::reference;
use lowp_kernels::{Master, Rule, State, UpdateAmax, UpdateJob};

pub fn update_jobs<B: Fenced>(rig: &Rig<B>) {
    all::<B, UpdateJob<B>>(rig);
}

/// States of `rule` of `len` values, in bf16 where `half` says so; squares are not negative.
pub(super) fn states<B: Fenced>(
    choices: &mut Choices<'_, B>,
    rule: Rule,
    len: usize,
    half: [bool; Rule::MOST_STATES],
) -> Vec<State<B>> {
    let seed = choices.word();
    let first = values(len, seed, false);
    let squares = first.iter().rev().map(|x| x * x).collect();
    let mut stored = |values: &[f32], half| match half {
        true => {
            let narrow: Vec<bf16> = values.iter().map(|&x| bf16::from_f32(x)).collect();
            Source::Bf16(choices.buffer(&narrow))
        }
        false => Source::F32(choices.buffer(values)),
    };
    let mut all = Vec::new();
    for (values, half) in [first, squares].iter().zip(half).take(rule.states().len()) {
        all.push(stored(values, half).into());
    }
    all
}

fn any_states<B: Fenced>(choices: &mut Choices<'_, B>, rule: Rule, len: usize) -> Vec<State<B>> {
    let half = choices.coin();
    let both = half && choices.coin();
    states(choices, rule, len, [half, both])
}

/// Amaxes of a master of `shape`, of its tensor and of its lines.
pub(super) fn amax<B: Fenced>(choices: &mut Choices<'_, B>, shape: Shape) -> UpdateAmax<B> {
    let starts = [3, 3 + shape.rows];
    let lines = starts.map(|start| choices.coin().then_some(start));
    UpdateAmax {
        shape,
        out: choices.amaxes(3 + shape.rows + shape.cols),
        tensor: choices.pick(&[None, Some(0), Some(2)]),
        lines,
    }
}

impl<B: Fenced> Mutate<B> for UpdateJob<B> {
    const FIELDS: &'static [&'static str] = &[
        "rule",
        "rule and states",
        "master",
        "master in bf16",
        "master in halves",
        "states",
        "states = less",
        "grad",
        "group",
        "source_rounding",
        "amax.out",
        "amax.shape",
        "amax.tensor",
        "amax.lines",
        "amax = master",
        "encode = None",
        "encode",
        "encode",
        "encode",
    ];

    fn good(choices: &mut Choices<'_, B>) -> Self {
        let mut encode = EncodeJob::good(choices);
        let fused = choices.coin();
        let len = if fused {
            encode.shape.elements()
        } else {
            choices.below(3000)
        };
        encode.source = Source::F32(choices.floats(len, false));
        let master = encode.source.clone().into();
        let known = |input: TensorInput<B>| TensorInput::Known(input.slot().clone());
        encode.tensor = encode.tensor.map(|input| input.map(known));
        for key in &mut encode.kernels {
            key.hadamard = false;
        }
        let shape = match fused {
            true => encode.shape,
            false => choices.pick(&[Shape::new(1, len), Shape::new(len, 1)]),
        };
        let amax = amax(choices, shape);
        let rule = choices.pick(&Rule::ALL);
        of_one_row(UpdateJob {
            rule,
            master,
            states: any_states(choices, rule, len),
            random: None,
            grad: choices.source(len, false),
            group: choices.below(2),
            source_rounding: encode.source_rounding,
            amax: choices.pick(&[None, Some(amax)]),
            encode: fused.then(|| Box::new(encode)),
        })
    }

    fn mutate(&mut self, field: &str, choices: &mut Choices<'_, B>) {
        let UpdateJob {
            rule,
            master,
            states,
            random: _,
            grad,
            group,
            source_rounding,
            amax,
            encode,
        } = self;
        let len = master.len(&choices.rig.backend);
        match field {
            "master" => {
                let len = choices.length(len);
                *master = Source::F32(choices.floats(len, false)).into();
            }
            // Random bits are missing.
            "master in bf16" => *master = choices.source(len, true).into(),
            // It is not cast.
            "master in halves" => {
                let parameter = choices.buffer(&vec![0u8; 2 * len]);
                let len = choices.length(len);
                *master = Master::Bf16Plus16 {
                    parameter,
                    remainder: choices.bytes(2 * len),
                };
            }
            "rule" => *rule = choices.pick(&Rule::ALL),
            "rule and states" => {
                *rule = choices.pick(&Rule::ALL);
                *states = any_states(choices, *rule, len);
            }
            "states" => {
                let len = choices.length(len);
                *states = any_states(choices, *rule, len);
            }
            "states = less" => drop(states.pop()),
            "grad" => {
                let len = choices.length(len);
                *grad = choices.source(len, false);
            }
            "group" => *group = choices.size(*group),
            "source_rounding" => *source_rounding = choices.rounding(),
            "amax = master" => {
                let Master::Values(Source::F32(buffer)) = master.clone() else {
                    return;
                };
                *amax = Some(UpdateAmax::of_tensor(Slot { buffer, index: 0 }));
            }
            _ if field.starts_with("amax.") => {
                let Some(amax) = amax else { return };
                let side = choices.below(2);
                match field {
                    "amax.out" => {
                        let len = choices.length(choices.rig.backend.len::<f32>(&amax.out));
                        amax.out = choices.amaxes(len);
                    }
                    "amax.shape" if side == 0 => {
                        amax.shape = Shape::new(amax.shape.cols, amax.shape.rows);
                    }
                    "amax.shape" => amax.shape.rows = choices.size(amax.shape.rows),
                    "amax.tensor" => {
                        let entry = choices.size(1);
                        amax.tensor = choices.pick(&[None, Some(entry)]);
                    }
                    _ => {
                        let entry = choices.size(1);
                        amax.lines[side] = choices.pick(&[None, Some(entry)]);
                    }
                }
            }
            "encode = None" => *encode = None,
            _ => {
                if let Some(encode) = encode {
                    let (field, source) =
                        (choices.pick(EncodeJob::<B>::FIELDS), encode.source.clone());
                    encode.mutate(field, choices);
                    if choices.below(4) > 0 {
                        encode.source = source;
                    }
                }
            }
        }
    }

    fn resize(&mut self, choices: &mut Choices<'_, B>) {
        let now = self.master.len(&choices.rig.backend);
        let len = match &self.encode {
            None => now,
            Some(encode) => small(&[encode.shape.rows, encode.shape.cols]).unwrap_or(now),
        };
        let master = Source::F32(choices.floats(len, false));
        self.master = master.clone().into();
        self.states = any_states(choices, self.rule, len);
        self.grad = choices.source(len, false);
        if let Some(encode) = &mut self.encode {
            resize_targets(&mut encode.targets, encode.shape, choices);
            encode.source = master;
            encode.source_rounding = self.source_rounding;
        }
    }

    fn work(self) -> Work<B> {
        Work::Update(vec![self])
    }

    fn expected(&self, rig: &Rig<B>) -> Vec<Output<B>> {
        let scalars = scalars();
        let (group, scale) = (&scalars.groups[self.group], scalars.grad_scale);
        let mut master = rig.master(self);
        let grads = rig.widened(&self.grad);
        let mut states = rig.states(self);
        for (i, g) in grads.iter().enumerate() {
            let mut element = [master[i], 0.0, 0.0];
            for (x, state) in element[1..].iter_mut().zip(&states) {
                *x = state[i];
            }
            let element =
                reference::update(self.rule, element, g * self.rule.grad_factor(scale), group);
            master[i] = element[0];
            for (x, state) in element[1..].iter().zip(&mut states) {
                state[i] = *x;
            }
        }
        let narrow = |x: &[f32]| x.iter().map(|&x| bf16::from_f32(x)).collect();
        let output = |(state, values): (&State<B>, Vec<f32>)| match state {
            State::Values(Source::F32(buffer)) => Output::Floats("state", buffer.clone(), values),
            State::Values(Source::Bf16(buffer)) => Output::Halves(buffer.clone(), narrow(&values)),
            State::Fp8(_) => unreachable!("these jobs have no states in fp8"),
        };
        let mut outputs: Vec<Output<B>> = self.states.iter().zip(states).map(output).collect();
        if let Some(amax) = &self.amax {
            let mut entries = rig.content::<f32>(&amax.out);
            let rounded = master.iter().map(|&x| self.source_rounding.apply(x));
            for (at, x) in rounded.enumerate() {
                let (row, col) = (at / amax.shape.cols.max(1), at % amax.shape.cols.max(1));
                let lines = amax.lines.iter().zip([row, col]);
                let lines = lines.filter_map(|(first, line)| first.map(|first| first + line));
                for entry in amax.tensor.into_iter().chain(lines) {
                    entries[entry] = raised(entries[entry], reference::amax([x]));
                }
            }
            // A vector of which nothing is raised is not touched, and may be that of the master.
            if amax.tensor.is_some() || amax.lines != [None; 2] {
                outputs.push(Output::Floats("amaxes", amax.out.clone(), entries));
            }
        }
        if let Some(encode) = &self.encode {
            outputs.extend(encoded(rig, encode, &master));
        }
        match &self.master {
            Master::Values(Source::F32(buffer)) => {
                outputs.push(Output::Floats("master", buffer.clone(), master));
            }
            Master::Values(Source::Bf16(_)) => unreachable!("these jobs have no random bits"),
            Master::Bf16Plus16 {
                parameter,
                remainder,
            } => {
                let halves = master.into_iter().map(remainder::split);
                let (parameters, remainders): (Vec<_>, Vec<_>) = halves
                    .map(|(p, r)| (p.to_le_bytes(), r.to_le_bytes()))
                    .unzip();
                outputs.extend([
                    Output::Bytes("parameters", parameter.clone(), parameters.concat()),
                    Output::Bytes("remainders", remainder.clone(), remainders.concat()),
                ]);
            }
        }
        outputs
    }

    fn group(&self) -> usize {
        self.group
    }
}

/// A job whose fused encode has one target of each part and order, as every backend takes it.
fn of_one_row<B: Fenced>(mut job: UpdateJob<B>) -> UpdateJob<B> {
    if let Some(encode) = &mut job.encode {
        let mut seen = Vec::new();
        encode.targets.retain(|target| {
            let orientation = target.spec.key.usage.orientations().next();
            let block = orientation.and_then(|o| encode.kernels[o as usize].block);
            let name = (target.spec.key.part, target.spec.axes, block);
            let first = !seen.contains(&name);
            seen.push(name);
            first
        });
    }
    job
}
