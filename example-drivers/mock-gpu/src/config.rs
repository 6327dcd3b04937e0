//! The operator's config: which GPUs to simulate.

use std::collections::BTreeSet;
use std::ops::Range;

use nodedock_sdk::{Problem, parse_json};
use serde::Deserialize;

const DEVICES_MAX: u64 = 4096;
const PARTITIONS_MAX: u32 = 15;
/// Counter sets of a pool (`resource.k8s.io/v1`): one for each GPU with partitions.
const COUNTER_SETS_MAX: u32 = 8;
const TEXT_BYTES_MAX: usize = 64;

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Config {
    #[serde(default = "one_pool")]
    pub(crate) pools: Vec<PoolConfig>,
    #[serde(default = "first_version")]
    pub(crate) driver_version: String,
    /// Devices that are reported as seen and not offered.
    #[serde(default)]
    pub(crate) left_out: Vec<LeftOut>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct PoolConfig {
    pub(crate) name: String,
    pub(crate) count: u32,
    /// Number of the first GPU. Numbers are unique in the driver, so that the names of a container's variables are unique.
    #[serde(default)]
    first_index: u32,
    #[serde(default = "usual_model")]
    pub(crate) model: String,
    #[serde(default = "usual_memory", rename = "memoryGiB")]
    pub(crate) memory_gib: u32,
    /// NUMA nodes that are assigned to the GPUs round robin.
    #[serde(default)]
    numa_nodes: Vec<u32>,
    /// True if several claims may use a GPU at once, each with a share of its memory.
    #[serde(default)]
    pub(crate) shared: bool,
    /// Number of equal parts of a GPU; each is a device beside the whole one.
    #[serde(default)]
    pub(crate) partitions: u32,
    #[serde(default)]
    pub(crate) extended_resource: Option<String>,
    #[serde(default)]
    pub(crate) unhealthy: Vec<Unhealthy>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Unhealthy {
    pub(crate) index: u32,
    pub(crate) message: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LeftOut {
    pub(crate) name: String,
    pub(crate) reason: String,
}

/// A device of a pool: a GPU, or a part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gpu {
    /// Index relative to the pool's first GPU.
    pub(crate) offset: u32,
    pub(crate) partition: Option<u32>,
}

fn first_version() -> String {
    "1.0.0".to_owned()
}

fn usual_model() -> String {
    "Mock-100".to_owned()
}

fn usual_memory() -> u32 {
    80
}

fn one_pool() -> Vec<PoolConfig> {
    vec![PoolConfig {
        name: "gpus".to_owned(),
        count: 4,
        first_index: 0,
        model: usual_model(),
        memory_gib: usual_memory(),
        numa_nodes: Vec::new(),
        shared: false,
        partitions: 0,
        extended_resource: None,
        unhealthy: Vec::new(),
    }]
}

impl Config {
    /// Parses a config and refuses one that cannot be simulated.
    pub(crate) fn read(text: &str) -> Result<Self, Problem> {
        let config: Config = parse_json("bad-config", "config of mock-gpu", text)?;
        if !is_version(&config.driver_version) {
            return Err(bad(&format!(
                "driverVersion {:?} is not like 1.2.3",
                config.driver_version
            )));
        }
        config.pools.iter().try_for_each(PoolConfig::check)?;
        config.check_together()?;
        config.check_left_out()?;
        Ok(config)
    }

    fn check_together(&self) -> Result<(), Problem> {
        let devices: u64 = self.pools.iter().map(PoolConfig::devices).sum();
        if devices > DEVICES_MAX {
            return Err(bad(&format!("{devices} devices, at most {DEVICES_MAX}")));
        }
        for (at, pool) in self.pools.iter().enumerate() {
            let before = &self.pools[..at];
            if before.iter().any(|other| other.name == pool.name) {
                return Err(pool.bad("its name occurs twice"));
            }
            if before
                .iter()
                .any(|other| overlap(&other.indices(), &pool.indices()))
            {
                return Err(pool.bad("its GPUs have numbers of another pool's; set firstIndex"));
            }
        }
        Ok(())
    }

    fn check_left_out(&self) -> Result<(), Problem> {
        let mut names = BTreeSet::new();
        for LeftOut { name, reason } in &self.left_out {
            if name.is_empty() || reason.is_empty() {
                return Err(bad("leftOut has an entry without a name or a reason"));
            }
            if !names.insert(name) {
                return Err(bad(&format!("leftOut has {name:?} twice")));
            }
        }
        Ok(())
    }

    /// Returns the pool and the device of these names.
    pub(crate) fn find(&self, pool: &str, device: &str) -> Result<(&PoolConfig, Gpu), Problem> {
        let missing = || {
            Problem::not_found(
                "no-such-device",
                format!("there is no device {pool}/{device}"),
            )
        };
        let config = self
            .pools
            .iter()
            .find(|config| config.name == pool)
            .ok_or_else(missing)?;
        let gpu = config.gpu_named(device).ok_or_else(missing)?;
        Ok((config, gpu))
    }
}

fn overlap(a: &Range<u32>, b: &Range<u32>) -> bool {
    !a.is_empty() && !b.is_empty() && a.start < b.end && b.start < a.end
}

impl PoolConfig {
    fn check(&self) -> Result<(), Problem> {
        let name = !self.name.is_empty() && self.name == self.name.to_ascii_lowercase();
        let even = self.partitions == 0 || self.memory_gib.is_multiple_of(self.partitions);
        let rules = [
            (name, "its name must be a DNS subdomain"),
            (self.memory_gib > 0, "memoryGiB must be at least 1"),
            (
                self.model.len() <= TEXT_BYTES_MAX,
                "model must have at most 64 bytes",
            ),
            (self.partitions <= PARTITIONS_MAX, "at most 15 partitions"),
            (
                self.partitions == 0 || self.count <= COUNTER_SETS_MAX,
                "at most 8 GPUs with partitions, because a pool has at most 8 counter sets",
            ),
            (even, "memoryGiB must be a multiple of partitions"),
            (
                self.partitions == 0 || !self.shared,
                "shared and partitions exclude each other",
            ),
            (
                self.first_index.checked_add(self.count).is_some(),
                "firstIndex is too large",
            ),
        ];
        match rules.iter().find(|(holds, _)| !holds) {
            Some((_, rule)) => Err(self.bad(rule)),
            None => self.check_unhealthy(),
        }
    }

    fn check_unhealthy(&self) -> Result<(), Problem> {
        match self
            .unhealthy
            .iter()
            .find(|unhealthy| !self.indices().contains(&unhealthy.index))
        {
            Some(unhealthy) => Err(self.bad(&format!(
                "there is no GPU {} to be unhealthy",
                unhealthy.index
            ))),
            None => Ok(()),
        }
    }

    fn bad(&self, reason: &str) -> Problem {
        bad(&format!("pool {:?}: {reason}", self.name))
    }

    fn devices(&self) -> u64 {
        u64::from(self.count) * (1 + u64::from(self.partitions))
    }

    fn indices(&self) -> Range<u32> {
        self.first_index..self.first_index + self.count
    }

    /// Returns the GPUs, each followed by its partitions.
    pub(crate) fn gpus(&self) -> impl Iterator<Item = Gpu> {
        let partitions = self.partitions;
        (0..self.count).flat_map(move |offset| {
            let parts = (0..partitions).map(Some);
            std::iter::once(None)
                .chain(parts)
                .map(move |partition| Gpu { offset, partition })
        })
    }

    /// Returns the GPU or partition of a name, if the pool has it.
    fn gpu_named(&self, name: &str) -> Option<Gpu> {
        let number = name.strip_prefix("gpu-")?;
        let (index, partition) = match number.split_once("-part-") {
            Some((index, partition)) => (index, Some(partition.parse().ok()?)),
            None => (number, None),
        };
        let gpu = Gpu {
            offset: index.parse::<u32>().ok()?.checked_sub(self.first_index)?,
            partition,
        };
        let is_there = gpu.offset < self.count
            && partition.is_none_or(|partition| partition < self.partitions);
        // Another notation of a number is another name.
        (is_there && self.name_of(gpu) == name).then_some(gpu)
    }

    pub(crate) fn index_of(&self, gpu: Gpu) -> u32 {
        self.first_index + gpu.offset
    }

    pub(crate) fn name_of(&self, gpu: Gpu) -> String {
        match gpu.partition {
            None => format!("gpu-{}", self.index_of(gpu)),
            Some(partition) => format!("gpu-{}-part-{partition}", self.index_of(gpu)),
        }
    }

    /// Returns the prefix of the container's variables: `MOCK_GPU_0`, `MOCK_GPU_0_PART_1`.
    pub(crate) fn env_prefix(&self, gpu: Gpu) -> String {
        format!(
            "MOCK_{}",
            self.name_of(gpu).replace('-', "_").to_ascii_uppercase()
        )
    }

    pub(crate) fn counter_set(&self, offset: u32) -> String {
        self.name_of(Gpu {
            offset,
            partition: None,
        })
    }

    pub(crate) fn memory_of(&self, gpu: Gpu) -> u32 {
        match gpu.partition {
            None => self.memory_gib,
            Some(_) => self.memory_gib / self.partitions,
        }
    }

    pub(crate) fn numa_node_of(&self, gpu: Gpu) -> Option<u32> {
        let nodes = u32::try_from(self.numa_nodes.len()).unwrap_or(u32::MAX);
        let turn = gpu.offset.checked_rem(nodes)?;
        self.numa_nodes.get(turn as usize).copied()
    }

    /// Returns a UUID that is the same in every call and boot, and different on every node.
    pub(crate) fn uuid(&self, node: &str, gpu: Gpu) -> String {
        let name = format!("{node}/{}/{}", self.name, self.name_of(gpu));
        let (high, low) = (hash(&name, 0), hash(&name, 1));
        format!(
            "GPU-{:08x}-{:04x}-{:04x}-{:04x}-{:012x}",
            high >> 32,
            (high >> 16) & 0xffff,
            high & 0xffff,
            low >> 48,
            low & 0xffff_ffff_ffff
        )
    }
}

/// FNV-1a, 64 bits.
fn hash(text: &str, seed: u64) -> u64 {
    let start = 0xcbf2_9ce4_8422_2325 ^ seed;
    text.bytes().fold(start, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

fn is_version(text: &str) -> bool {
    let parts: Vec<_> = text.split('.').collect();
    text.len() <= TEXT_BYTES_MAX
        && parts.len() == 3
        && parts.iter().all(|part| {
            let canonical = *part == "0" || !part.starts_with('0');
            canonical && !part.is_empty() && part.bytes().all(|digit| digit.is_ascii_digit())
        })
}

fn bad(reason: &str) -> Problem {
    Problem::invalid("bad-config", format!("config of mock-gpu: {reason}"))
}
