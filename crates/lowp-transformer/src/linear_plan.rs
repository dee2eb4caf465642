//! [`LinearPlan`]: which products a linear layer runs on a GPU, and the buffers that it needs for them.

use lowp_format::{
    BufferSpec, Code, Columnwise, Form, FormatError, Operand, Orientation, Part, Recipe, Role,
    Rounding, ScaleLayout, Shape, Usage,
};
use lowp_fsdp::{code_buffers, encoded};
use lowp_gemm::GemmKind;
use lowp_gemm::table::{Codes, Pass, is_codes};
use lowp_kernels::{rounds, rounds_by_block};

use crate::places::{BF16, DECODED_GRADIENT, F32, OperandNames, Place};

/// Factors of a product of two-level codes: alpha, and beta for what was there or was not.
pub(crate) const FACTORS: Place = Place::lent("factors of a product", 3 * F32);

/// What a linear layer over a batch of tokens does.
#[derive(Clone, Debug)]
pub(crate) struct LinearPlan {
    /// Forward, input gradient, weight gradient.
    pub(crate) products: [GemmKind; 3],
    /// How the input is quantized.
    activation: Operand,
    /// What forward multiplies, or casts; none where an activation rounds it as it makes it.
    pub(crate) input: Option<Place>,
    /// Whether backward makes the input again and rounds it for the gradient of the weight: no codes of it are kept.
    pub(crate) input_is_made_again: bool,
    /// Whether the backward pass of an activation rounds the gradient as it makes it.
    pub(crate) gradient_is_made: bool,
    /// Codes and scales of the input, and of the gradient of what forward makes.
    pub(crate) x: Vec<Place>,
    pub(crate) dy: Vec<Place>,
    /// Operands whose casts leave values in the place of codes, for products of values.
    pub(crate) rounded: Vec<RoundedOperand>,
    /// Operands that hold codes, for products of values.
    pub(crate) decodes: Vec<Decode>,
    /// Block scales of operands that products read in another form.
    pub(crate) repacks: Vec<Repack>,
    /// What becomes of the gathered weight in forward and in backward.
    pub(crate) weights: [WeightUse; 2],
}

/// An operand that is rounded to the values of its codes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RoundedOperand {
    pub(crate) role: Role,
    pub(crate) orientation: Orientation,
    pub(crate) to: Place,
}

/// The decode of an operand.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Decode {
    pub(crate) role: Role,
    pub(crate) orientation: Orientation,
    /// The orientation whose codes are decoded.
    pub(crate) from: Orientation,
    pub(crate) to: Place,
}

/// The copy of block scales into the form that products read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Repack {
    pub(crate) role: Role,
    pub(crate) orientation: Orientation,
    pub(crate) form: Form,
    pub(crate) to: Place,
}

/// What becomes of a gathered weight before it is multiplied.
#[derive(Clone, Copy, Debug)]
pub(crate) enum WeightUse {
    AsItIs,
    Decode(Place),
    /// Its block scales are copied into the form that products read.
    Repack {
        form: Form,
        place: Place,
    },
}

/// An operand of a layer that is cast.
#[derive(Clone, Copy, Debug)]
struct LayerOperand {
    operand: Operand,
    /// Tokens x features.
    shape: Shape,
}

impl LayerOperand {
    /// Whether an activation rounds the operand that it makes: nobody reads its values themselves, and its scales are those of blocks alone.
    fn is_rounded_as_made(&self) -> bool {
        let by_block = rounds_by_block(&self.operand.quantizers.kernels(), self.shape);
        by_block && encoded(&self.operand, Code::Bf16) == Usage::BOTH
    }
}

/// The operands of a layer that are cast.
#[derive(Clone, Copy, Debug)]
struct LayerOperands {
    activation: LayerOperand,
    gradient: LayerOperand,
}

impl LayerOperands {
    /// Of a layer whose weight has `shape`.
    fn new(recipe: &impl Recipe, shape: Shape, tokens: usize) -> Self {
        let of = |role, width| LayerOperand {
            operand: recipe.operand(role),
            shape: Shape::new(tokens, width),
        };
        Self {
            activation: of(Role::Activation, shape.cols),
            gradient: of(Role::Gradient, shape.rows),
        }
    }

    fn of(&self, role: Role) -> LayerOperand {
        match role {
            Role::Gradient => self.gradient,
            Role::Activation | Role::Weight => self.activation,
        }
    }
}

impl LinearPlan {
    /// Of a weight of `shape` in `recipe`.
    pub(crate) fn new(
        recipe: &impl Recipe,
        shape: Shape,
        tokens: usize,
        names: &OperandNames,
        capability: (i32, i32),
    ) -> Result<Self, FormatError> {
        let codes_of = |(role, orientation)| Codes::of(recipe, role, orientation);
        let products = Pass::ALL.map(|pass| {
            let [a, b] = pass.operands().map(codes_of);
            let [_, _, depth] = pass.sizes(shape, tokens);
            GemmKind::of(a, b, capability).over(depth)
        });
        let values = BF16 * tokens * shape.cols;
        let operands = LayerOperands::new(recipe, shape, tokens);
        let LayerOperands {
            activation,
            gradient,
        } = operands;
        let made = |pass: Pass, of: LayerOperand| {
            products[pass as usize] == GemmKind::Bf16 && of.is_rounded_as_made()
        };
        let input_is_made = names.activated && made(Pass::Forward, activation);
        let own = names.gradient;
        // Values alone have a place of their own: layers whose gradients are made together would write the same codes.
        let of_values = products[Pass::WeightGrad as usize] == GemmKind::Bf16;
        let own = own.filter(|_| of_values && made(Pass::InputGrad, gradient));
        let [input, kept] = names.input;
        let to = own.unwrap_or(DECODED_GRADIENT);
        let mut rounded = rounded(&operands, products, to);
        let input_is_made_again = input_is_made && of_values;
        rounded.extend(input_is_made_again.then_some(RoundedOperand {
            role: Role::Activation,
            orientation: Orientation::Columnwise,
            to: Place::lent("decoded columns of an input", values),
        }));
        let codes = |role| {
            let operand = &operands.of(role).operand;
            let usage = encoded(operand, Code::Bf16);
            code_buffers(operand, usage, |o| is_rounded(&rounded, role, o)).into_iter()
        };
        let x = codes(Role::Activation).map(|spec| {
            let bytes = spec.bytes(activation.shape);
            let place = match spec.key.usage == Usage::ROWWISE {
                true => Place::lent("x", bytes),
                // What the weight's gradient reads stays until backward.
                false => Place::kept(kept, bytes),
            };
            place.of_spec(spec)
        });
        let dy = codes(Role::Gradient);
        let dy = dy.map(|spec| Place::lent("dy", spec.bytes(gradient.shape)).of_spec(spec));
        let mut plan = Self {
            products,
            activation: activation.operand,
            input: match codes_of((Role::Activation, Orientation::Columnwise)) {
                _ if input_is_made => None,
                Some(_) => Some(Place::lent(input, values)),
                None => Some(Place::kept(kept, values)),
            },
            input_is_made_again,
            gradient_is_made: own.is_some(),
            x: x.collect(),
            dy: dy.collect(),
            rounded: Vec::new(),
            decodes: Vec::new(),
            repacks: Vec::new(),
            weights: [
                weight(recipe, shape, Orientation::Rowwise, products[0], names)?,
                weight(recipe, shape, Orientation::Columnwise, products[1], names)?,
            ],
        };
        plan.rounded = rounded;
        for pass in Pass::ALL {
            for (role, orientation) in pass.operands() {
                if role != Role::Weight && !is_rounded(&plan.rounded, role, orientation) {
                    plan.add_decode(pass, role, orientation, operands.of(role));
                    plan.add_repack(pass, role, orientation, operands.of(role))?;
                }
            }
        }
        Ok(plan)
    }

    /// Adds the decode of the codes that `of` is cast into, where `pass` reads values.
    fn add_decode(&mut self, pass: Pass, role: Role, orientation: Orientation, of: LayerOperand) {
        let LayerOperand { operand, shape } = of;
        let usage = encoded(&operand, Code::Bf16);
        let reads_values = self.products[pass as usize] == GemmKind::Bf16;
        if !reads_values || !usage.contains(orientation.usage()) {
            return;
        }
        // Transposed codes hold the same values, and row-major ones are decoded faster.
        let from = match operand.quantizers.relation {
            Columnwise::Quantized => orientation,
            Columnwise::Transposed | Columnwise::Shared => Orientation::Rowwise,
        };
        // Rowwise codes of inputs are gone by then.
        let there = role == Role::Gradient || pass == Pass::Forward;
        let made = usage.contains(from.usage());
        self.decodes.push(Decode {
            role,
            orientation,
            from: if there && made { from } else { orientation },
            to: decoded(role, shape),
        });
    }

    /// Adds the copy of the block scales of `of`, where `pass` reads them in another form.
    fn add_repack(
        &mut self,
        pass: Pass,
        role: Role,
        orientation: Orientation,
        of: LayerOperand,
    ) -> Result<(), FormatError> {
        let scales = match role {
            Role::Gradient => "scales of dy",
            Role::Activation | Role::Weight => "scales of x",
        };
        let mut specs = buffers(&of.operand);
        let scale = specs.find(|spec| spec.key.serves(orientation, Part::BlockScale));
        if let (Some(form), Some(spec)) = (self.products[pass as usize].scale_form(), scale)
            && let Some([_, to]) = layouts(&spec, of.shape, orientation, form)?
        {
            self.repacks.push(Repack {
                role,
                orientation,
                form,
                to: Place::lent(scales, to.bytes()).of_spec(spec),
            });
        }
        Ok(())
    }

    /// Whether a layer that reads the same values may have the input of the layer of this plan: its products read the same of it. Scales of
    /// earlier steps and random numbers are those of one layer.
    pub(crate) fn shares_input(&self, other: &Self) -> bool {
        let read = |plan: &Self| {
            let [forward, _, weight_grad] = plan.products;
            (plan.activation, [forward, weight_grad])
        };
        let Operand {
            quantizers,
            rounding,
            ..
        } = self.activation;
        let kernels = quantizers.kernels();
        let own = rounding == Rounding::Stochastic || kernels.iter().any(|k| k.scale.is_delayed());
        !own && read(self) == read(other)
    }

    /// The buffers of its input.
    pub(crate) fn input_places(&self) -> Vec<Place> {
        let of_codes = self.x.iter().copied();
        let mut all = Vec::from_iter(self.input);
        all.extend(of_codes.chain(self.made_of(Role::Activation)));
        all
    }

    /// The others, but those of the weight, which depend on where it is gathered.
    pub(crate) fn places(&self) -> Vec<Place> {
        let mut all = self.dy.clone();
        all.extend(self.made_of(Role::Gradient));
        let two_level = self.products.contains(&GemmKind::Fp4Groups16);
        all.extend(two_level.then_some(FACTORS));
        all
    }

    /// What is rounded, decoded and repacked of an operand.
    fn made_of(&self, role: Role) -> impl Iterator<Item = Place> {
        let Self {
            rounded,
            decodes,
            repacks,
            ..
        } = self;
        let rounded = rounded.iter().map(|made| (made.role, made.to));
        let decodes = decodes.iter().map(|made| (made.role, made.to));
        let repacks = repacks.iter().map(|made| (made.role, made.to));
        let all = rounded.chain(decodes).chain(repacks);
        all.filter(move |(of, _)| *of == role).map(|(_, to)| to)
    }
}

/// The buffers that an operand of bf16 values is cast into.
fn buffers(operand: &Operand) -> impl Iterator<Item = BufferSpec> {
    let usage = encoded(operand, Code::Bf16);
    let cast = (!usage.is_empty()).then(|| operand.quantizers.buffers(usage));
    cast.into_iter().flatten()
}

/// The operands that are rounded as they are cast: those whose values alone are read, and soon. What the weight's gradient reads of the
/// input stays until backward as codes, which are shorter.
fn rounded(
    operands: &LayerOperands,
    products: [GemmKind; 3],
    of_gradient: [&'static str; 2],
) -> Vec<RoundedOperand> {
    let read = [
        (Role::Activation, Orientation::Rowwise, Pass::Forward),
        (Role::Gradient, Orientation::Rowwise, Pass::InputGrad),
        (Role::Gradient, Orientation::Columnwise, Pass::WeightGrad),
    ];
    let mut all = Vec::new();
    for (role, orientation, pass) in read {
        let LayerOperand { operand, shape } = operands.of(role);
        let cast = encoded(&operand, Code::Bf16).contains(orientation.usage());
        let known = rounds(&operand.quantizers.kernels(), shape);
        if cast && known && products[pass as usize] == GemmKind::Bf16 {
            let to = match role {
                // Rows and columns are there at the same time.
                Role::Gradient => {
                    Place::lent(of_gradient[orientation as usize], BF16 * shape.elements())
                }
                Role::Activation | Role::Weight => decoded(role, shape),
            };
            all.push(RoundedOperand {
                role,
                orientation,
                to,
            });
        }
    }
    all
}

fn is_rounded(all: &[RoundedOperand], role: Role, orientation: Orientation) -> bool {
    let here =
        |rounded: &RoundedOperand| (rounded.role, rounded.orientation) == (role, orientation);
    all.iter().any(here)
}

/// The memory that decoded values of an operand go to, until the next ones.
fn decoded(role: Role, shape: Shape) -> Place {
    let what = match role {
        Role::Activation | Role::Weight => "decoded input",
        Role::Gradient => DECODED_GRADIENT[0],
    };
    Place::lent(what, BF16 * shape.elements())
}

fn weight(
    recipe: &impl Recipe,
    shape: Shape,
    orientation: Orientation,
    product: GemmKind,
    names: &OperandNames,
) -> Result<WeightUse, FormatError> {
    if product == GemmKind::Bf16 {
        let kernel = recipe.kernel(orientation);
        // bf16 is row-major for both phases.
        return Ok(match kernel.element == Code::Bf16 && !is_codes(&kernel) {
            true => WeightUse::AsItIs,
            false => WeightUse::Decode(Place::lent(names.weight, BF16 * shape.elements())),
        });
    }
    let specs = recipe.buffers(Usage::BOTH);
    let mut specs = specs.iter();
    let scales = specs.find(|spec| spec.key.serves(orientation, Part::BlockScale));
    let (Some(spec), Some(form)) = (scales, product.scale_form()) else {
        return Ok(WeightUse::AsItIs);
    };
    Ok(match layouts(spec, shape, orientation, form)? {
        Some([_, to]) => WeightUse::Repack {
            form,
            place: Place::lent("scales of a weight", to.bytes()),
        },
        None => WeightUse::AsItIs,
    })
}

/// The layouts of block scales in their Compact form and in `form`; none where both are the same.
fn layouts(
    spec: &BufferSpec,
    shape: Shape,
    orientation: Orientation,
    form: Form,
) -> Result<Option<[ScaleLayout; 2]>, FormatError> {
    let layout = |form| ScaleLayout::new(spec, shape, orientation, form);
    let [from, to] = [layout(Form::Compact)?, layout(form)?];
    let same = form == Form::Padded && from.padded() == to.padded();
    Ok((!same).then_some([from, to]))
}

#[cfg(test)]
mod tests;
