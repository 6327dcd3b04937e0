//! Describes GPUs and MIG instances as devices of the inventory.

use nodedock_sdk::{CounterSet, Device, DeviceNode, Problem, TaintEffect};

use crate::function::Function;
use crate::machine::Machine;
use crate::nvidia::{Information, Mig};
use nodedock_sdk::pci::Address;

/// Counters of a set, by the contract.
const COUNTERS_MAX: usize = 32;
/// Bytes of an attribute's text, by the contract.
const TEXT_BYTES_MAX: usize = 64;
const UNUSABLE_TAINT: &str = "gpu.nodedock.dev/unusable";

/// The device of a GPU that a name means.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Whole,
    /// GPU instance and compute instance.
    Mig(u32, u32),
}

/// Parses a device's name: `0000-3b-00-0` or `0000-3b-00-0-gi1-ci0`.
pub(crate) fn parse_name(name: &str) -> Option<(Address, Part)> {
    let Some((label, instances)) = name.split_once("-gi") else {
        return Some((Address::from_label(name)?, Part::Whole));
    };
    let (gpu_instance, compute_instance) = instances.split_once("-ci")?;
    let part = Part::Mig(gpu_instance.parse().ok()?, compute_instance.parse().ok()?);
    Some((Address::from_label(label)?, part))
}

/// Collects the counters that make a GPU exclude its MIG instances: one counter for each GPU with MIG, as large as their number. An
/// instance consumes one, the GPU consumes all.
#[derive(Default)]
pub(crate) struct MigCounters {
    sets: Vec<CounterSet>,
}

impl MigCounters {
    pub(crate) fn into_sets(self) -> Vec<CounterSet> {
        self.sets
    }

    /// Adds the counter of a GPU and returns the name of its set.
    fn add(&mut self, label: &str, migs: usize) -> String {
        if self
            .sets
            .last()
            .is_none_or(|set| set.counters.len() == COUNTERS_MAX)
        {
            self.sets
                .push(CounterSet::new(format!("mig-{}", self.sets.len())));
        }
        let last = self.sets.len() - 1;
        let set = std::mem::take(&mut self.sets[last]).counter(label, migs.to_string());
        self.sets[last] = set;
        self.sets[last].name.clone()
    }
}

/// Returns the devices of one GPU: the GPU itself, and its MIG instances.
pub(crate) fn devices(
    machine: &Machine,
    function: &Function,
    counters: &mut MigCounters,
) -> Vec<Device> {
    let label = function.address.label();
    let migs = machine.nvidia.migs(&function.address);
    let mut whole = gpu(machine, function);
    if migs.is_empty() {
        return vec![whole];
    }
    let set = counters.add(&label, migs.len());
    whole = whole.consumes(consumption(&set, &label, migs.len()));
    let mut devices = Vec::new();
    for mig in migs {
        whole = whole.identity(mig_identity(function, mig));
        devices.push(mig_device(machine, function, mig).consumes(consumption(&set, &label, 1)));
    }
    devices.insert(0, whole);
    devices
}

fn consumption(set: &str, label: &str, count: usize) -> CounterSet {
    CounterSet::new(set).counter(label, count.to_string())
}

fn gpu(machine: &Machine, function: &Function) -> Device {
    let address = function.address.as_str();
    let device = Device::new(function.address.label())
        .attribute("type", "gpu")
        .attribute("class", function.class.as_str())
        .attribute_opt("uniqueId", function.unique_id.as_deref().map(text))
        .attribute_opt("sriovTotalVfs", function.sriov.map(|(total, _)| total))
        .attribute_opt("sriovNumVfs", function.sriov.map(|(_, number)| number))
        .attribute_opt("physfn", function.physfn.clone())
        .attribute_opt(
            "computePartition",
            function.compute_partition.as_deref().map(text),
        )
        .attribute_opt(
            "memoryPartition",
            function.memory_partition.as_deref().map(text),
        )
        .attribute_opt(
            "uuid",
            information(machine, function)
                .and_then(|gpu| gpu.uuid.as_deref())
                .map(text),
        )
        .identity(format!("pci:{address}"));
    // The kernel shows no device behind this node.
    let device = match machine
        .nvidia
        .gpu(&function.address)
        .filter(|_| function.has_nvidia_driver())
    {
        Some(gpu) => device.identity(format!("dev:/dev/nvidia{}", gpu.minor)),
        None => device,
    };
    let device = match function.memory_bytes {
        Some(bytes) => device.capacity("memory", quantity(bytes)),
        None => device,
    };
    finish(device, machine, function, machine.gpu_nodes(function))
}

fn mig_device(machine: &Machine, function: &Function, mig: &Mig) -> Device {
    let label = function.address.label();
    let device = Device::new(format!("{label}-{}", mig.label()))
        .attribute("type", "mig")
        .attribute("parent", label)
        .attribute("gpuInstance", mig.gpu_instance)
        .attribute("computeInstance", mig.compute_instance)
        .attribute_opt(
            "parentUUID",
            information(machine, function)
                .and_then(|gpu| gpu.uuid.as_deref())
                .map(text),
        )
        .identity(mig_identity(function, mig));
    finish(device, machine, function, machine.mig_nodes(function, mig))
}

/// Adds what a GPU and its MIG instances have in common.
fn finish(
    device: Device,
    machine: &Machine,
    function: &Function,
    nodes: Result<Vec<DeviceNode>, Problem>,
) -> Device {
    let model = information(machine, function).and_then(|gpu| gpu.model.as_deref());
    let version = machine
        .nvidia
        .version
        .as_deref()
        .filter(|_| function.has_nvidia_driver());
    let device = device
        .attribute("resource.kubernetes.io/pciBusID", function.address.as_str())
        .attribute_opt("resource.kubernetes.io/pcieRoot", function.root.clone())
        .attribute("vendor", function.vendor.as_str())
        .attribute("device", function.device.as_str())
        .attribute_opt("driver", function.driver.as_deref().map(text))
        .attribute_opt("driverVersion", version.map(text))
        .attribute_opt(
            "productName",
            model.or(function.product_name.as_deref()).map(text),
        );
    let device = match function.numa_node {
        Some(node) => device.numa_node(node),
        None => device,
    };
    match nodes {
        Ok(_) => device,
        Err(problem) => device.taint(UNUSABLE_TAINT, problem.code, TaintEffect::NoSchedule),
    }
}

fn information<'a>(machine: &'a Machine, function: &Function) -> Option<&'a Information> {
    machine.nvidia.gpu(&function.address)
}

/// Not the identity of the function: the instances of a GPU are used side by side. The GPU has these identities too.
fn mig_identity(function: &Function, mig: &Mig) -> String {
    format!("pci:{}/{}", function.address.as_str(), mig.label())
}

/// Truncates a text to what an attribute can have.
fn text(text: &str) -> String {
    let text = text.trim();
    text[..text.floor_char_boundary(TEXT_BYTES_MAX)].to_owned()
}

/// Writes bytes in the largest unit that keeps them exact.
fn quantity(bytes: u64) -> String {
    let units = [(30, "Gi"), (20, "Mi"), (10, "Ki")];
    let unit = units
        .iter()
        .find(|(bits, _)| bytes.trailing_zeros() >= *bits);
    unit.map_or_else(
        || bytes.to_string(),
        |(bits, unit)| format!("{}{unit}", bytes >> bits),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_as_gpus_or_instances() {
        let address = || Address::parse("0000:3b:00.0").unwrap();
        assert_eq!(parse_name("0000-3b-00-0"), Some((address(), Part::Whole)));
        assert_eq!(
            parse_name("0000-3b-00-0-gi1-ci0"),
            Some((address(), Part::Mig(1, 0)))
        );
        for name in [
            "gpu",
            "0000-3b-00-0-gi1",
            "0000-3b-00-0-gi1-cix",
            "-gi1-ci0",
        ] {
            assert_eq!(parse_name(name), None, "{name}");
        }
    }

    #[test]
    fn memory_is_exact_in_largest_unit() {
        assert_eq!(quantity(16 << 30), "16Gi");
        assert_eq!(quantity(17_163_091_968), "16368Mi");
        assert_eq!(quantity(1025), "1025");
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        assert_eq!(text(&"é".repeat(40)).len(), 64);
        assert_eq!(text(" a \n"), "a");
    }

    #[test]
    fn counter_sets_hold_at_most_32() {
        let mut counters = MigCounters::default();
        let sets: Vec<_> = (0..33)
            .map(|gpu| counters.add(&format!("gpu-{gpu}"), 7))
            .collect();
        assert_eq!((sets[31].as_str(), sets[32].as_str()), ("mig-0", "mig-1"));
        assert_eq!(counters.into_sets().len(), 2);
    }
}
