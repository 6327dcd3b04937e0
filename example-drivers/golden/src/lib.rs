//! Two slots as devices: the example driver in Rust, with equivalent drivers in C, Python and JavaScript.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use nodedock_sdk::{
    AllocatedDevice, AttributeValue, Claim, ClaimRecord, ContainerEdits, Context, Device, Driver,
    DriverInfo, Host, Inventory, Pool, Prepared, Problem, Trigger,
};
const POOL: &str = "slots";
const SLOTS: [&str; 2] = ["slot-0", "slot-1"];
const MODES: [&str; 2] = ["normal", "quiet"];
const CPUS: &str = "devices/system/cpu/online";

/// Parameters of a claim or a class: an object of texts. A struct with serde would also accept a list.
type Parameters = BTreeMap<String, String>;

struct Golden;

nodedock_sdk::export_driver!(Golden);

impl Driver for Golden {
    fn describe() -> DriverInfo {
        DriverInfo::new("golden.nodedock.dev", env!("CARGO_PKG_VERSION"))
            .summary("Two slots, the same driver in every language")
            .sysfs_read([CPUS])
            .env(["GOLDEN_*"])
            .annotation("language", "rust")
    }

    fn discover(host: &Host, _: &Context, _: &Trigger) -> Result<Inventory, Problem> {
        // Returns the host's problem for a file that is not granted or does not exist.
        let cpus = host.sysfs().read(CPUS)?;
        let (devices, claims) = (
            SLOTS.len().to_string(),
            host.prepared_claims().all().count().to_string(),
        );
        host.log().info(
            "discovered",
            &[("devices", devices.as_str()), ("claims", claims.as_str())],
        );
        let slots = SLOTS
            .iter()
            .zip(0i64..)
            .map(|(name, index)| slot(index, name, &cpus));
        Ok(Inventory::new().pool(Pool::new(POOL).devices(slots)))
    }

    fn prepare(host: &Host, _: &Context, claim: &Claim) -> Result<Prepared, Problem> {
        let mut memo = String::new();
        let mut prepared = Prepared::each(claim, |allocated| {
            let mode = mode_of(claim, allocated)?;
            memo += &format!("{} {mode}\n", allocated.device);
            Ok(ContainerEdits::new().env(variable(&allocated.device), mode))
        })?;
        prepared.memo = memo.into_bytes();
        let before = host
            .prepared_claims()
            .get(&claim.id.uid)
            .filter(|record| record.prepared);
        if before.is_some_and(|before| before.memo != prepared.memo) {
            let message = "the claim is prepared with other devices or modes";
            return Err(Problem::invalid("prepared-otherwise", message));
        }
        host.log()
            .info("prepared", &[("claim", claim.id.name.as_str())]);
        Ok(prepared)
    }

    fn unprepare(host: &Host, _: &Context, live: &ClaimRecord) -> Result<(), Problem> {
        // A claim whose prepare did not complete has no memo and nothing to unprepare.
        if !String::from_utf8_lossy(&live.memo).lines().all(is_ours) {
            return Err(Problem::internal(
                "bad-memo",
                "the memo is not one that this driver writes",
            ));
        }
        host.log()
            .info("unprepared", &[("claim", live.claim.id.name.as_str())]);
        Ok(())
    }
}

fn slot(index: i64, name: &str, cpus: &str) -> Device {
    Device::new(name)
        .attribute("index", index)
        .attribute("model", "Golden Slot")
        .attribute("firmware", AttributeValue::version("1.2.0"))
        .attribute("spare", index > 0)
        .attribute("cpus", cpus)
        .allow_multiple_allocations(true)
}

/// Returns the mode from the parameters of the claim, or else of its class.
fn mode_of(claim: &Claim, allocated: &AllocatedDevice) -> Result<String, Problem> {
    let AllocatedDevice {
        pool,
        device,
        request,
        ..
    } = allocated;
    if pool != POOL || !SLOTS.contains(&device.as_str()) {
        return Err(Problem::not_found(
            "no-such-device",
            format!("there is no {pool}/{device}"),
        ));
    }
    let mode = claim
        .parse_parameters::<Parameters>(request)?
        .map_or_else(|| Ok(MODES[0].to_owned()), mode_in)?;
    if !MODES.contains(&mode.as_str()) {
        let message = format!("mode \"{mode}\" is not one of normal, quiet");
        return Err(Problem::invalid("no-such-mode", message));
    }
    Ok(mode)
}

fn mode_in(mut parameters: Parameters) -> Result<String, Problem> {
    let mode = parameters
        .remove("mode")
        .unwrap_or_else(|| MODES[0].to_owned());
    if !parameters.is_empty() {
        let message = "the parameters are not an object with nothing but a text \"mode\"";
        return Err(Problem::invalid("bad-parameters", message));
    }
    Ok(mode)
}

fn variable(device: &str) -> String {
    format!("GOLDEN_{}", device.to_uppercase().replace('-', "_"))
}

/// Formats a line of a memo.
fn is_ours(line: &str) -> bool {
    let Some((device, mode)) = line.split_once(' ') else {
        return false;
    };
    SLOTS.contains(&device) && MODES.contains(&mode)
}
