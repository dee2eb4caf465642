//! What FSDP2 does with the hooks of a parameter, imitated byte for byte.
#![allow(dead_code, reason = "every test file uses its own part")]

use lowp_format::{AnyRecipe, BufferKey, Phase, QuantizedTensor, Recipe, RowCuts, Shape, Usage};
use lowp_kernels::{Backend, Cpu, CpuBuffer, Source};
use lowp_shard::{
    CastItem, CastPlan, FullTensor, GatherGroup, GatherHooks, GatherPool, GatherTag,
    ScaleBookBuilder, SendBuffers, ShardError, ShardSpec, ShardedTensor, quantize,
};

use crate::common::{bytes, ranks, values};

pub(crate) type Shard = ShardedTensor<Cpu>;
pub(crate) type Full = FullTensor<Cpu>;
/// The bytes of each buffer.
pub(crate) type Content = Vec<(BufferKey, Vec<u8>)>;

pub(crate) fn content(tensor: &QuantizedTensor<CpuBuffer<u8>>) -> Content {
    let bytes = |buffer: &CpuBuffer<u8>| Cpu.download(buffer).expect("bytes");
    let buffers = tensor.buffers().iter();
    buffers.map(|b| (b.spec.key, bytes(&b.storage))).collect()
}

/// The matrix of that seed quantized at once, for `usage`.
pub(crate) fn whole(recipe: AnyRecipe, shape: Shape, usage: Usage, seed: u64) -> Content {
    let source = Source::F32(Cpu.upload(&values(seed, shape.elements())).expect("values"));
    content(&quantize(&Cpu, recipe, shape, usage, source, None).expect("a quantized tensor"))
}

/// All ranks' shards of one parameter, as ranks of a world cast them.
pub(crate) struct Param {
    pub(crate) recipe: AnyRecipe,
    pub(crate) cuts: RowCuts,
    pub(crate) shape: Shape,
    pub(crate) shards: Vec<Shard>,
}

impl Param {
    pub(crate) fn new(recipe: AnyRecipe, cuts: RowCuts, cols: usize, usage: Usage) -> Self {
        let shape = Shape::new(cuts.rows(), cols);
        let spec = |rank| ShardSpec::from_cuts(&recipe, shape, cuts.clone(), rank, usage);
        Self::of(recipe, (0..cuts.world()).map(spec))
    }

    /// Rows cut as FSDP2 does.
    pub(crate) fn chunked(recipe: AnyRecipe, shape: Shape, world: usize, usage: Usage) -> Self {
        let spec = |rank| ShardSpec::chunked(&recipe, shape, world, rank, usage);
        Self::of(recipe, (0..world).map(spec))
    }

    fn of(recipe: AnyRecipe, specs: impl Iterator<Item = Result<ShardSpec, ShardError>>) -> Self {
        let shard = |spec: Result<ShardSpec, ShardError>| ShardedTensor::new(&Cpu, recipe, spec?);
        let shards: Vec<Shard> = specs.map(shard).collect::<Result<_, _>>().expect("shards");
        let spec = shards[0].spec();
        Self {
            recipe,
            cuts: spec.cuts().clone(),
            shape: spec.full(),
            shards,
        }
    }

    pub(crate) fn even(recipe: AnyRecipe, rows: usize, world: usize) -> Self {
        let cuts = RowCuts::new(rows, world, recipe.row_quantum(Usage::BOTH)).expect("cuts");
        Self::new(recipe, cuts, 64, Usage::BOTH)
    }

    /// Casts the values of `seed` into all shards, and returns what the gather engine makes of them for each phase.
    pub(crate) fn cast(&self, seed: u64) -> [Option<Content>; 2] {
        let all = values(seed, self.shape.elements());
        let gathered = ranks(self.cuts.world(), |rank, comm| {
            let shard = &self.shards[rank];
            let own = Source::F32(Cpu.upload(&all[shard.spec().elements()])?);
            let mut book = ScaleBookBuilder::default();
            let item = CastItem::rows(shard.local(), own, &mut book);
            let book = book.build(&Cpu)?;
            CastPlan::new(&Cpu, &book, &[item])?.calibrate(&book, &*comm)?;
            let pool = GatherPool::new(&Cpu);
            let mut group = GatherGroup::new(&Cpu, comm, &pool, vec![shard.clone()], true)?;
            let mut phases = [None, None];
            for phase in Phase::ALL {
                if group.plan(0, phase).is_some() {
                    group.unshard(phase)?;
                    phases[phase as usize] = Some(content(group.tensor(0)?));
                }
            }
            Ok(phases)
        });
        gathered.into_iter().next().expect("rank 0")
    }
}

/// Buffers of one size that FSDP2 keeps for what arrives.
pub(crate) fn memory(hooks: &GatherHooks) -> Vec<CpuBuffer<u8>> {
    let inputs = hooks.inputs().iter();
    let buffers = inputs.map(|input| Cpu.alloc::<u8>(input.arriving()));
    buffers.collect::<Result<_, _>>().expect("room")
}

/// One gather of one parameter on all ranks, as FSDP2 does it.
pub(crate) struct Fsdp {
    pub(crate) send_buffers: Vec<SendBuffers<Cpu>>,
}

impl Fsdp {
    pub(crate) fn new(param: &Param, hooks: &GatherHooks) -> Self {
        let send_buffers = param.shards.iter().map(|shard| {
            // Padding has any content.
            hooks.send_buffers_with(&Cpu, shard, |input, n| {
                assert_eq!(n, input.padded);
                Ok(Cpu.upload(&bytes(7, n))?)
            })
        });
        let send_buffers = send_buffers
            .collect::<Result<_, _>>()
            .expect("send_buffers");
        Self { send_buffers }
    }

    /// All inputs of a rank go into one flat buffer, all ranks' flat buffers are gathered, and each input is copied out
    /// to `arrived`.
    pub(crate) fn gather(&self, arrived: &[CpuBuffer<u8>]) -> Vec<GatherTag> {
        let (mut flat, mut sent) = (Vec::new(), Vec::new());
        for send_buffers in &self.send_buffers {
            sent.push(send_buffers.pre_all_gather(&Cpu).expect("sent"));
            let buffers = send_buffers.buffers().iter();
            let inputs = buffers.map(|b| Cpu.download(b).expect("bytes"));
            flat.push(inputs.collect::<Vec<_>>().concat());
        }
        let (mut start, hooks) = (0, sent[0].hooks());
        for (input, arrived) in hooks.inputs().iter().zip(arrived) {
            let own = start..start + input.padded;
            for (rank, flat) in flat.iter().enumerate() {
                let piece = &flat[own.clone()];
                Cpu.write(arrived, rank * input.padded, piece)
                    .expect("room");
            }
            start = own.end;
        }
        // As many bytes from every rank.
        assert!(flat.iter().all(|flat| flat.len() == start));
        sent
    }
}

/// One rank's part of a gather: what the tests below need.
pub(crate) struct One {
    pub(crate) param: Param,
    pub(crate) fsdp: Fsdp,
    pub(crate) arrived: Vec<CpuBuffer<u8>>,
}

impl One {
    pub(crate) fn new(name: &str, phase: Phase) -> Self {
        let recipe = AnyRecipe::from_name(name, &Default::default()).expect("a recipe");
        let param = Param::even(recipe, 96, 2);
        let hooks = GatherHooks::new(recipe, param.shards[0].spec(), phase).expect("hooks");
        let fsdp = Fsdp::new(&param, &hooks);
        let arrived = memory(&hooks);
        Self {
            param,
            fsdp,
            arrived,
        }
    }

    pub(crate) fn shard(&self) -> &Shard {
        &self.param.shards[0]
    }

    /// Casts and gathers, and returns what rank 0 said and what its tensor must be.
    pub(crate) fn gather(&self, seed: u64) -> (GatherTag, Content) {
        self.param.cast(seed);
        let sent = self.fsdp.gather(&self.arrived).swap_remove(0);
        let usage = sent.hooks().usage();
        (
            sent,
            whole(self.param.recipe, self.param.shape, usage, seed),
        )
    }

    pub(crate) fn full(&self, seed: u64) -> (GatherTag, Full) {
        let (sent, expected) = self.gather(seed);
        let full = sent.post_all_gather(&Cpu, self.shard(), &self.arrived);
        let full = full.expect("a full tensor");
        assert_eq!(content(full.tensor().expect("filled")), expected);
        (sent, full)
    }
}
