//! The name of a claim decides its outcome: a correct, wrong, late or missing answer. For tests of the host.

mod script;
#[cfg(test)]
mod tests;

use nodedock_sdk::{
    Claim, ClaimRecord, ClaimRef, Condition, ConditionStatus, ContainerEdits, Context, Device,
    DeviceStatus, Driver, DriverInfo, Host, Inventory, NetworkData, Outcomes, Pool, Prepared,
    Problem, Trigger,
};

pub use script::{Command, Fault, RELEASE_UID, STRANGER_UID, Script, ScriptedWrite, WRITABLE};

/// The driver's name and its only pool.
pub const NAME: &str = "scripted.nodedock.dev";
pub const POOL: &str = "script";

/// Bytes of a memo that is too large for the host.
const HUGE_MEMO: usize = 128 << 10;

/// Bytes that, with the driver itself, are most of the 64 MiB of a call.
const NEAR_THE_LIMIT: usize = 56 << 20;

/// Bytes that a driver with growing memory allocates at once.
const GROWN: usize = 1 << 20;

const HOUR: std::time::Duration = std::time::Duration::from_secs(3600);

/// Iterations between two checks for the claim that ends a hold: about a millisecond, because the host bounds the host calls of a call.
const SPIN: u32 = 1_000_000;

struct Scripted;

nodedock_sdk::export_driver!(Scripted);

impl Driver for Scripted {
    fn describe() -> DriverInfo {
        DriverInfo::new(NAME, env!("CARGO_PKG_VERSION"))
            .summary("Does with a claim what the claim's name says, for tests")
            .env(["SCRIPTED_*"])
            .sysfs_write(WRITABLE, "[0-9]")
    }

    fn discover(host: &Host, ctx: &Context, trigger: &Trigger) -> Result<Inventory, Problem> {
        let script = ctx.config::<Script>()?;
        assert!(
            script
                .blinded_by
                .as_ref()
                .is_none_or(|uid| host.prepared_claims().get(uid).is_none()),
            "the script says not to look"
        );
        if script.fault == Some(Fault::DevicesOnlyAtLoad) && !matches!(trigger, Trigger::Load) {
            return Ok(Inventory::new().pool(Pool::new(POOL)));
        }
        let pool = match script.fault {
            Some(Fault::PoolOfTheBoot) => format!("{POOL}-{}", &ctx.boot_id[..8]),
            _ => POOL.to_owned(),
        };
        let names = Command::ALL
            .iter()
            .flat_map(|(name, _)| [(*name).to_owned(), format!("{name}-2")]);
        let plain = (0..script.devices).map(|number| format!("device-{number}"));
        let generation = format!("generation-{}", script.generation);
        let devices = names.chain(plain).chain([generation]).map(Device::new);
        Ok(Inventory::new().pool(Pool::new(pool).devices(devices)))
    }

    fn prepare(_: &Host, _: &Context, claim: &Claim) -> Result<Prepared, Problem> {
        Prepared::each(claim, |_| {
            Ok(ContainerEdits::new().env("SCRIPTED_CLAIM", &claim.id.name))
        })
    }

    fn prepare_batch(host: &Host, ctx: &Context, claims: &[Claim]) -> Outcomes<Prepared> {
        log_call(host, "prepare", claims.iter().map(|claim| &claim.id));
        let outcomes = claims
            .iter()
            .flat_map(|claim| match ctx.config::<Script>() {
                Ok(script) => {
                    let command = script.for_prepare(&claim.id.name);
                    carry_out(host, command, &claim.id, || {
                        prepared(host, ctx, claim, command)
                    })
                }
                Err(problem) => vec![(claim.id.uid.clone(), Err(problem))],
            })
            .collect();
        // no error: the outcomes have it
        let fault = ctx.config::<Script>().ok().and_then(|script| script.fault);
        with_fault(fault, outcomes)
    }

    fn unprepare_batch(host: &Host, ctx: &Context, claims: &[ClaimRecord]) -> Outcomes<()> {
        log_call(host, "unprepare", claims.iter().map(|live| &live.claim.id));
        claims
            .iter()
            .flat_map(|live| match ctx.config::<Script>() {
                Ok(script) => {
                    let id = &live.claim.id;
                    carry_out(host, script.for_unprepare(&id.name), id, || Ok(()))
                }
                Err(problem) => vec![(live.claim.id.uid.clone(), Err(problem))],
            })
            .collect()
    }
}

fn with_fault(fault: Option<Fault>, mut outcomes: Outcomes<Prepared>) -> Outcomes<Prepared> {
    match fault {
        Some(Fault::OnlyTheFirstOfACall) => outcomes.truncate(1),
        Some(Fault::OneRefusalFailsAll) => {
            let refusal = outcomes
                .iter()
                .find_map(|(_, outcome)| outcome.as_ref().err().cloned());
            if let Some(refusal) = refusal {
                outcomes
                    .iter_mut()
                    .for_each(|(_, outcome)| *outcome = Err(refusal.clone()));
            }
        }
        Some(Fault::NearTheMemoryLimit) => {
            std::hint::black_box(vec![1_u8; NEAR_THE_LIMIT]);
        }
        _ => {}
    }
    outcomes
}

/// Logs the batch in one line, which tests read.
fn log_call<'a>(host: &Host, operation: &str, claims: impl Iterator<Item = &'a ClaimRef>) {
    let names: Vec<_> = claims.map(|id| id.name.as_str()).collect();
    host.log()
        .info(&format!("asked to {operation} {}", names.join(",")), &[]);
}

/// Returns the entries of the answer for one claim. `well` is the outcome of a success.
fn carry_out<T>(
    host: &Host,
    command: Command,
    claim: &ClaimRef,
    well: impl Fn() -> Result<T, Problem>,
) -> Outcomes<T> {
    let this = |outcome| (claim.uid.clone(), outcome);
    match command {
        Command::Ok | Command::Release | Command::Huge | Command::OtherDevice => {
            vec![this(well())]
        }
        Command::RefusePermanent => vec![this(Err(Problem::invalid(
            "driver-refused",
            "the script refuses it",
        )))],
        Command::RefuseTransient => vec![this(Err(Problem::unavailable(
            "driver-refused",
            "the script waits",
        )))],
        Command::RefuseAnHour => {
            let problem = Problem::unavailable("driver-refused", "the script waits");
            vec![this(Err(problem.retry_after(HOUR)))]
        }
        Command::Die => panic!("the script says to die"),
        Command::Hold => {
            hold(host);
            vec![this(well())]
        }
        Command::Skip => Vec::new(),
        Command::Twice => vec![this(well()), this(well())],
        Command::Stranger => vec![(STRANGER_UID.to_owned(), well()), this(well())],
        Command::WrongClaim => vec![(STRANGER_UID.to_owned(), well())],
        Command::Spin => for_ever(|| {}),
        Command::Grow => {
            let mut held = Vec::new();
            for_ever(|| held.push(vec![1u8; GROWN]))
        }
        Command::Flood => for_ever(|| host.log().info("the script says to log", &[])),
    }
}

/// The host ends the call.
fn for_ever(mut work: impl FnMut()) -> ! {
    loop {
        work();
        std::hint::black_box(());
    }
}

/// A driver has nothing to wait on, so it polls.
fn hold(host: &Host) {
    while host.prepared_claims().get(RELEASE_UID).is_none() {
        for turn in 0..SPIN {
            std::hint::black_box(turn);
        }
    }
}

fn prepared(
    host: &Host,
    ctx: &Context,
    claim: &Claim,
    command: Command,
) -> Result<Prepared, Problem> {
    if let Some(write) = ctx.config::<Script>()?.write {
        host.sysfs().write(&write.path, &write.value)?;
    }
    let mut prepared = Scripted::prepare(host, ctx, claim)?;
    if ctx.config::<Script>()?.fault == Some(Fault::EditsOfTheBoot) {
        prepared = prepared.edits(ContainerEdits::new().env("SCRIPTED_BOOT", &ctx.boot_id));
    }
    if ctx.config::<Script>()?.report {
        prepared
            .devices
            .iter_mut()
            .for_each(|device| device.status = Some(status()));
    }
    match command {
        Command::Huge => prepared.memo = vec![b'x'; HUGE_MEMO],
        Command::OtherDevice => prepared
            .devices
            .iter_mut()
            .for_each(|device| device.device.push_str("-else")),
        _ => {}
    }
    Ok(prepared)
}

/// A status with every field that one can have.
fn status() -> DeviceStatus {
    let ready = Condition {
        kind: "Ready".to_owned(),
        status: ConditionStatus::True,
        reason: "Scripted".to_owned(),
        message: "the script says so".to_owned(),
    };
    let network = NetworkData {
        interface_name: "net1".to_owned(),
        ips: vec!["192.0.2.5/24".to_owned(), "2001:db8::5/64".to_owned()],
        hardware_address: "00:00:5e:00:53:01".to_owned(),
    };
    // With white space, which is the driver's to choose.
    let data = Some("{ \"mtu\": 9000 }".to_owned());
    DeviceStatus {
        conditions: vec![ready],
        data,
        network: Some(network),
        attributes: Vec::new(),
    }
}
