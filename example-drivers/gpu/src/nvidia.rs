//! Reads what NVIDIA's kernel driver shows below `/proc`: its GPUs, and the MIG instances that exist.

use std::collections::BTreeMap;

use nodedock_sdk::{Host, Problem};

use nodedock_sdk::pci::Address;

const INFORMATION: &str = "/proc/driver/nvidia/gpus/*/information";
const GPU_INSTANCE: &str = "/proc/driver/nvidia/capabilities/gpu*/mig/gi*/access";
const COMPUTE_INSTANCE: &str = "/proc/driver/nvidia/capabilities/gpu*/mig/gi*/ci*/access";
const DEVICES: &str = "/proc/devices";
const VERSION: &str = "/proc/driver/nvidia/version";

/// Files that the driver reads.
pub(crate) const FILES: [&str; 5] = [
    INFORMATION,
    GPU_INSTANCE,
    COMPUTE_INSTANCE,
    DEVICES,
    VERSION,
];

/// Names of the character devices of GPUs in `/proc/devices`, of older and of newer kernel drivers.
const GPU_MAJORS: [&str; 2] = ["nvidia-frontend", "nvidia"];

/// A GPU, from its file `information`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Information {
    /// `N` of `/dev/nvidiaN`.
    pub(crate) minor: u32,
    pub(crate) model: Option<String>,
    pub(crate) uuid: Option<String>,
    /// True if the kernel driver does not use the GPU, as its module parameter demands.
    pub(crate) is_excluded: bool,
}

/// A compute instance in a GPU instance of MIG.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mig {
    pub(crate) gpu_instance: u32,
    pub(crate) compute_instance: u32,
    /// Minor numbers of the capabilities that give access to the GPU instance and to the compute instance.
    pub(crate) capabilities: [u32; 2],
}

impl Mig {
    /// Returns the end of the device's name: `gi1-ci0`.
    pub(crate) fn label(&self) -> String {
        format!("gi{}-ci{}", self.gpu_instance, self.compute_instance)
    }
}

/// Everything that NVIDIA's kernel driver shows; empty if it is not loaded.
#[derive(Debug, Default)]
pub(crate) struct Nvidia {
    gpus: BTreeMap<Address, Information>,
    /// MIG instances by minor number of the GPU.
    migs: BTreeMap<u32, Vec<Mig>>,
    /// Major numbers of character devices by name.
    majors: BTreeMap<String, u32>,
    pub(crate) version: Option<String>,
}

impl Nvidia {
    pub(crate) fn read(host: &Host) -> Result<Self, Problem> {
        let files = host.host_files();
        let gpus = gpus(host)?;
        if gpus.is_empty() {
            return Ok(Self::default());
        }
        Ok(Nvidia {
            migs: migs(host)?,
            majors: files
                .find(DEVICES)?
                .as_deref()
                .map(majors)
                .unwrap_or_default(),
            version: files.find(VERSION)?.as_deref().and_then(version),
            gpus,
        })
    }

    pub(crate) fn gpu(&self, address: &Address) -> Option<&Information> {
        self.gpus.get(address)
    }

    /// Returns the MIG instances of a GPU, sorted; empty without MIG.
    pub(crate) fn migs(&self, address: &Address) -> &[Mig] {
        let minor = self.gpu(address).map(|gpu| gpu.minor);
        minor
            .and_then(|minor| self.migs.get(&minor))
            .map_or(&[], Vec::as_slice)
    }

    pub(crate) fn gpu_major(&self) -> Option<u32> {
        GPU_MAJORS.iter().find_map(|name| self.major(name))
    }

    pub(crate) fn major(&self, name: &str) -> Option<u32> {
        self.majors.get(name).copied()
    }
}

fn gpus(host: &Host) -> Result<BTreeMap<Address, Information>, Problem> {
    let mut gpus = BTreeMap::new();
    for file in host.host_files().glob(INFORMATION)? {
        let address = file
            .path
            .split('/')
            .nth_back(1)
            .and_then(|name| Address::parse(&name.to_ascii_lowercase()));
        let text = host.host_files().find(&file.path)?;
        if let (Some(address), Some(information)) = (address, text.as_deref().and_then(information))
        {
            gpus.insert(address, information);
        }
    }
    Ok(gpus)
}

/// Pairs the capability of each compute instance with that of its GPU instance. One without the other gives access to nothing.
fn migs(host: &Host) -> Result<BTreeMap<u32, Vec<Mig>>, Problem> {
    let gpu_instances: BTreeMap<_, _> = capabilities(host, GPU_INSTANCE)?.into_iter().collect();
    let mut migs: BTreeMap<u32, Vec<Mig>> = BTreeMap::new();
    for (numbers, capability) in capabilities(host, COMPUTE_INSTANCE)? {
        let [gpu, gpu_instance, compute_instance] = numbers[..] else {
            continue;
        };
        let Some(outer) = gpu_instances.get(&vec![gpu, gpu_instance]) else {
            continue;
        };
        let mig = Mig {
            gpu_instance,
            compute_instance,
            capabilities: [*outer, capability],
        };
        migs.entry(gpu).or_default().push(mig);
    }
    for migs in migs.values_mut() {
        migs.sort_by_key(|mig| (mig.gpu_instance, mig.compute_instance));
    }
    Ok(migs)
}

/// Returns the numbers in the path of each file (GPU, GPU instance, compute instance) with its capability's minor number.
fn capabilities(host: &Host, pattern: &str) -> Result<Vec<(Vec<u32>, u32)>, Problem> {
    let mut found = Vec::new();
    for file in host.host_files().glob(pattern)? {
        let text = host.host_files().find(&file.path)?;
        let minor = text
            .as_deref()
            .and_then(|text| field(text, "DeviceFileMinor")?.parse().ok());
        if let Some(minor) = minor {
            found.push((numbers(&file.path), minor));
        }
    }
    Ok(found)
}

/// Returns the numbers of the segments `gpuN`, `giN`, `ciN`, in their order.
fn numbers(path: &str) -> Vec<u32> {
    path.split('/')
        .filter_map(|segment| {
            ["gpu", "gi", "ci"]
                .iter()
                .find_map(|prefix| segment.strip_prefix(prefix)?.parse().ok())
        })
        .collect()
}

fn information(text: &str) -> Option<Information> {
    Some(Information {
        minor: field(text, "Device Minor")?.parse().ok()?,
        model: field(text, "Model")
            .filter(|model| *model != "Unknown")
            .map(str::to_owned),
        // Until the GPU was opened once it has no UUID, only question marks.
        uuid: field(text, "GPU UUID")
            .filter(|uuid| !uuid.contains('?'))
            .map(str::to_owned),
        is_excluded: field(text, "GPU Excluded") == Some("Yes"),
    })
}

/// Returns the value of a line `NAME: VALUE`.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let mut fields = text.lines().filter_map(|line| line.split_once(':'));
    let value = fields.find_map(|(key, value)| (key.trim() == name).then(|| value.trim()));
    value.filter(|value| !value.is_empty())
}

/// Parses the character devices of `/proc/devices`; the block devices come after them.
fn majors(text: &str) -> BTreeMap<String, u32> {
    let lines = text
        .lines()
        .take_while(|line| !line.starts_with("Block devices"));
    let pairs = lines.filter_map(|line| line.trim().split_once(' '));
    pairs
        .filter_map(|(major, name)| Some((name.to_owned(), major.parse().ok()?)))
        .collect()
}

/// Returns the version of the kernel module: `NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 …`.
fn version(text: &str) -> Option<String> {
    let line = text.lines().find(|line| line.starts_with("NVRM version"))?;
    line.split_whitespace()
        .find(|word| word.contains('.') && word.split('.').all(|part| part.parse::<u32>().is_ok()))
        .map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpu_is_read_from_its_information() {
        let text = "Model: \t\t NVIDIA A100-SXM4-40GB\nIRQ:   \t\t 293\nGPU UUID: \t GPU-b8ea3855-276c-c9cb-b366-c6fa655957c5\n\
                    Bus Location: \t 0000:07:00.0\nDevice Minor: \t 3\nGPU Excluded:\t No\n";
        let gpu = information(text).unwrap();
        assert_eq!((gpu.minor, gpu.is_excluded), (3, false));
        assert_eq!(gpu.model.as_deref(), Some("NVIDIA A100-SXM4-40GB"));
        assert_eq!(
            gpu.uuid.as_deref(),
            Some("GPU-b8ea3855-276c-c9cb-b366-c6fa655957c5")
        );
        assert_eq!(information("Model: x\nDevice Minor: \n"), None);
        let unopened =
            information("GPU UUID: GPU-????????-????\nDevice Minor: 0\nGPU Excluded: Yes\n")
                .unwrap();
        assert_eq!((unopened.uuid, unopened.is_excluded), (None, true));
    }

    #[test]
    fn majors_are_those_of_character_devices() {
        let majors = majors(
            "Character devices:\n  1 mem\n195 nvidia\n\nBlock devices:\n  8 sd\n195 other\n",
        );
        assert_eq!(majors.get("nvidia"), Some(&195));
        assert_eq!((majors.get("sd"), majors.get("other")), (None, None));
    }

    #[test]
    fn version_consists_of_numbers_and_dots() {
        let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n";
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\nGCC version:  12.3.0\n";
        assert_eq!(version(closed).as_deref(), Some("535.104.05"));
        assert_eq!(version(open).as_deref(), Some("570.86.15"));
        assert_eq!(version("GCC version: 12.3.0\n"), None);
    }

    #[test]
    fn paths_of_capabilities_have_their_numbers() {
        assert_eq!(
            numbers("/proc/driver/nvidia/capabilities/gpu0/mig/gi11/ci2/access"),
            [0, 11, 2]
        );
    }
}
