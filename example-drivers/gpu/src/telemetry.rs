//! Values that kernel drivers show of a GPU beside its description: the sensors of `hwmon`, and the counters of amdgpu.

use nodedock_sdk::{DeviceReadings, Host, Problem, ProblemKind};

use crate::function::Function;

/// A file of a function's directory that has a number, and its unit.
struct Source {
    file: &'static str,
    reading: &'static str,
    /// The unit of the file in that of the reading.
    scale: f64,
}

const SOURCES: [Source; 5] = [
    source("hwmon/hwmon*/temp1_input", "temperature_celsius", 1e-3),
    // The first is an average over some milliseconds, which not every card has.
    source("hwmon/hwmon*/power1_average", "power_watts", 1e-6),
    source("hwmon/hwmon*/power1_input", "power_watts", 1e-6),
    source("gpu_busy_percent", "utilization_ratio", 1e-2),
    source("mem_info_vram_used", "memory_used_bytes", 1.0),
];

const fn source(file: &'static str, reading: &'static str, scale: f64) -> Source {
    Source {
        file,
        reading,
        scale,
    }
}

/// Returns the files that are read.
pub(crate) fn files() -> impl Iterator<Item = &'static str> {
    SOURCES.iter().map(|source| source.file)
}

/// Reads the sensors of a GPU. A card that the kernel has powered down refuses to be read: it has no readings until it is awake.
pub(crate) fn read(
    host: &Host,
    pool: &str,
    function: &Function,
) -> Result<DeviceReadings, Problem> {
    let mut device = DeviceReadings::new(pool, function.address.label());
    for source in &SOURCES {
        let has_reading = device
            .readings
            .iter()
            .any(|known| known.name == source.reading);
        let Some(value) = value(host, function, source)?.filter(|_| !has_reading) else {
            continue;
        };
        device = device.reading(source.reading, value);
    }
    Ok(device)
}

fn value(host: &Host, function: &Function, source: &Source) -> Result<Option<f64>, Problem> {
    let pattern = format!("{}/{}", function.directory(), source.file);
    let Some(path) = host.sysfs().glob(&pattern)?.into_iter().next() else {
        return Ok(None);
    };
    match host.sysfs().find_parsed::<f64>(&path) {
        Err(problem) if problem.kind == ProblemKind::Unavailable => {
            host.log()
                .debug("the kernel does not show a value", &[("path", &path)]);
            Ok(None)
        }
        read => Ok(read?.map(|value| value * source.scale)),
    }
}
