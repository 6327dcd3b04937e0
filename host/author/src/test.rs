//! `nodedock driver test`: what a driver finds on a recorded machine and what a container gets for each device, compared with a golden
//! file.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use serde::Serialize;
use serde_json::Value;
use similar::TextDiff;

use super::compile_cache::CompileCacheArgs;
use super::workbench::{Found, SubjectArgs, Use, UseArgs, Workbench, Written, devices};
use super::{read, write_file};
use nodedock_command::output::{Format, print_text};
use nodedock_core::driver::Published;
use nodedock_model::{
    DeviceHealth, DriverName, Inventory, LeftOutDevice, PreparedClaim, Problem, Readings,
};
use nodedock_wasm::{Trigger, WasmDriver};

/// Devices that are prepared, one after the other, in the order of their names.
const DEVICES_MAX: usize = 64;
/// Lines around a difference.
const CONTEXT_LINES: usize = 3;
/// Maximum size of a golden file: a driver may publish some thousand devices.
const GOLDEN_BYTES_MAX: u64 = 16 << 20;

#[derive(Args)]
pub struct TestArgs {
    #[command(flatten)]
    subject: SubjectArgs,
    #[command(flatten)]
    with: UseArgs,
    /// Recorded machine: a directory or a tar file with its /sys
    #[arg(long, value_name = "SNAPSHOT")]
    hardware: PathBuf,
    /// Compare the result with this file: JSON if it is named *.json, else YAML
    #[arg(long, value_name = "FILE")]
    golden: Option<PathBuf>,
    /// Write the golden file instead
    #[arg(long, requires = "golden")]
    update: bool,
    #[command(flatten)]
    cache: CompileCacheArgs,
    /// Form of the result without a golden file
    #[arg(short, long, value_enum, default_value_t = Format::Yaml, conflicts_with = "golden")]
    output: Format,
}

/// The result, without what differs between two runs.
#[derive(Serialize)]
struct Tested {
    driver: DriverName,
    #[serde(flatten)]
    inventory: Inventory,
    /// Health by pool and device, like the claims.
    health: BTreeMap<String, String>,
    /// Values of devices, like the health.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    readings: BTreeMap<String, Readings>,
    /// Reasons by the name of each device that the driver leaves out.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    left_out: BTreeMap<String, String>,
    claims: BTreeMap<String, ClaimResult>,
    /// Beyond the bound of this command; `None`: there are not so many.
    not_prepared: Option<usize>,
}

/// Result of a claim for one device.
#[derive(Debug, Default, Serialize)]
struct ClaimResult {
    prepared: Option<PreparedClaim>,
    /// Why it is not prepared.
    refused: Option<Problem>,
    /// Values below `/sys`, in the order of the writes.
    written: Vec<Written>,
    /// Why it is not unprepared.
    unprepare_refused: Option<Problem>,
    written_by_unprepare: Vec<Written>,
    /// A second prepare had another result, which the contract does not allow.
    repeated_otherwise: Option<Box<PreparedClaim>>,
}

pub(super) async fn run(args: TestArgs) -> Result<()> {
    let subject = args.subject.read()?;
    let bench = Workbench::new(Some(&args.hardware), &args.cache)?;
    let driver = bench.load(&subject).await?;
    let tested = test(&bench, &driver, &args.with.read()?).await?;
    let name = args.golden.as_deref().unwrap_or(Path::new(""));
    let is_json = args.output == Format::Json
        || name
            .extension()
            .is_some_and(|extension| extension == "json");
    let text = tested.text(is_json)?;
    match &args.golden {
        None => print_text(text.trim_end())?,
        Some(golden) if args.update => {
            write_file(golden, text.as_bytes())?;
            print_text(&format!("{}: {}", golden.display(), tested.summary()))?;
        }
        Some(golden) => compare(golden, &text, &tested.summary())?,
    }
    tested.ensure_repeatable()
}

async fn test(bench: &Workbench, driver: &WasmDriver, with: &Use) -> Result<Tested> {
    let name = driver.info().name.clone();
    let published = driver
        .publish(&driver.look_call(), Trigger::Load)
        .await
        .with_context(|| format!("{name} does not discover its devices"))?;
    let Published {
        inventory,
        left_out,
        health,
        telemetry,
    } = published;
    if let Some(problem) = telemetry.problem {
        return Err(problem).with_context(|| format!("{name} does not read its telemetry"));
    }
    let readings = telemetry.readings.into_iter();
    let readings =
        readings.map(|((pool, device), readings)| (format!("{pool}/{device}"), readings));
    let missing = driver.missing_resources(&inventory);
    anyhow::ensure!(
        missing.is_empty(),
        "{name} is not granted: {}",
        missing.join("; ")
    );
    let health = health
        .into_iter()
        .map(|((pool, device), DeviceHealth { state, message })| {
            (
                format!("{pool}/{device}"),
                format!("{}: {message}", state.as_str())
                    .trim_end_matches(": ")
                    .to_owned(),
            )
        });
    let mut claims = BTreeMap::new();
    with.check(&inventory)?;
    for (pool, name, device) in devices(&inventory).take(DEVICES_MAX) {
        // What it did with one device keeps no other from being tried.
        driver.containment().resume();
        claims.insert(
            format!("{pool}/{name}"),
            test_claim(bench, driver, (pool, name, device), with).await,
        );
    }
    let not_prepared = Some(inventory.device_count() - claims.len()).filter(|count| *count > 0);
    Ok(Tested {
        driver: name,
        inventory,
        health: health.collect(),
        readings: readings.collect(),
        left_out: left_out.devices().iter().map(named_reason).collect(),
        claims,
        not_prepared,
    })
}

fn named_reason(device: &LeftOutDevice) -> (String, String) {
    (device.name.clone(), device.reason.clone())
}

/// Prepares a claim for a device twice, and unprepares it; also one whose prepare failed, as a daemon does.
async fn test_claim(
    bench: &Workbench,
    driver: &WasmDriver,
    found: Found<'_>,
    with: &Use,
) -> ClaimResult {
    let mut result = ClaimResult::default();
    let mut claim = match bench.claim(driver, found, with) {
        Ok(claim) => claim,
        Err(problem) => {
            result.refused = Some(problem);
            return result;
        }
    };
    match claim.prepare(driver).await {
        Ok(prepared) => {
            match claim.prepare(driver).await {
                Ok(again) if again == prepared => {}
                Ok(again) => result.repeated_otherwise = Some(Box::new(again)),
                Err(problem) => result.refused = Some(problem),
            }
            result.prepared = Some(prepared);
        }
        Err(problem) => result.refused = Some(problem),
    }
    result.written = bench.take_writes();
    result.unprepare_refused = claim.unprepare(driver).await.err();
    result.written_by_unprepare = bench.take_writes();
    result
}

impl Tested {
    fn text(&self, is_json: bool) -> Result<String> {
        let mut value =
            compact(serde_json::to_value(self).context("write the result")?).unwrap_or_default();
        show_memos(&mut value);
        if is_json {
            Ok(serde_json::to_string_pretty(&value).context("write the result")? + "\n")
        } else {
            serde_saphyr::to_string(&value).context("write the result")
        }
    }

    fn summary(&self) -> String {
        let prepared = self
            .claims
            .values()
            .filter(|claim| claim.refused.is_none())
            .count();
        let refused = self.claims.len() - prepared;
        format!(
            "{} devices, {prepared} prepared, {refused} refused",
            self.inventory.device_count()
        )
    }

    fn ensure_repeatable(&self) -> Result<()> {
        let mut otherwise = self.claims.iter().filter(|(_, claim)| {
            claim.repeated_otherwise.is_some()
                || (claim.prepared.is_some() && claim.refused.is_some())
        });
        match otherwise.next() {
            None => Ok(()),
            Some((device, _)) => bail!(
                "{device}: a second prepare of the same claim has another result; the host may repeat a prepare at any time"
            ),
        }
    }
}

/// Shows a memo as text where it is text: in a record it is hex.
fn show_memos(value: &mut Value) {
    let Some(claims) = value.get_mut("claims").and_then(Value::as_object_mut) else {
        return;
    };
    let results = claims.values_mut().filter_map(Value::as_object_mut);
    let prepared = results
        .flat_map(|claim| claim.values_mut())
        .filter_map(|prepared| prepared.get_mut("memo"));
    for memo in prepared {
        let bytes = memo.as_str().and_then(|text| hex::decode(text).ok());
        if let Some(text) = bytes.and_then(|bytes| String::from_utf8(bytes).ok()) {
            *memo = Value::String(text);
        }
    }
}

/// Drops what is empty: fields that a driver does not use. `None`: nothing is left.
fn compact(value: Value) -> Option<Value> {
    match value {
        Value::Null => None,
        Value::Array(items) if items.is_empty() => None,
        Value::Object(fields) => {
            let fields: serde_json::Map<_, _> = fields
                .into_iter()
                .filter_map(|(key, value)| Some((key, compact(value)?)))
                .collect();
            (!fields.is_empty()).then_some(Value::Object(fields))
        }
        Value::Array(items) => {
            // An item has its place in the list, even if it is empty.
            Some(
                items
                    .into_iter()
                    .map(|item| compact(item.clone()).unwrap_or(item))
                    .collect(),
            )
        }
        value => Some(value),
    }
}

fn compare(golden: &Path, text: &str, summary: &str) -> Result<()> {
    let shown = golden.display();
    ensure!(
        golden.try_exists()?,
        "{shown} does not exist: write it with --update"
    );
    let wanted = read(golden, GOLDEN_BYTES_MAX)?;
    let wanted = String::from_utf8(wanted).with_context(|| format!("{shown} is not UTF-8 text"))?;
    if wanted == text {
        return print_text(&format!("{shown}: as before, {summary}"));
    }
    print_text(diff(&shown.to_string(), &wanted, text).trim_end())?;
    bail!("the result differs from {shown}; --update writes it again")
}

fn diff(name: &str, wanted: &str, text: &str) -> String {
    let diff = TextDiff::from_lines(wanted, text);
    diff.unified_diff()
        .context_radius(CONTEXT_LINES)
        .header(name, "result")
        .to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_fields_are_dropped_from_results() {
        let value = serde_json::json!({"a": [], "b": {"c": null}, "d": [{"e": {}}, 1], "f": false, "g": ""});
        let kept = serde_json::json!({"d": [{"e": {}}, 1], "f": false, "g": ""});
        assert_eq!(compact(value), Some(kept));
        assert_eq!(compact(serde_json::json!({"a": {}})), None);
    }

    #[test]
    fn text_memo_is_shown_as_text() {
        let claim =
            |memo: &str| serde_json::json!({"claims": {"p/d": {"prepared": {"memo": memo}}}});
        for (hex, shown) in [("6d6f6465", "mode"), ("ff00", "ff00"), ("", "")] {
            let mut value = claim(hex);
            show_memos(&mut value);
            assert_eq!(value, claim(shown));
        }
    }

    #[test]
    fn difference_is_shown_with_surrounding_lines() {
        let (wanted, text) = ("a\nb\nc\nd\ne\nf\ng\n", "a\nb\nc\nd\ne\nF\ng\n");
        assert_eq!(
            diff("golden.yaml", wanted, text),
            "--- golden.yaml\n+++ result\n@@ -3,5 +3,5 @@\n c\n d\n e\n-f\n+F\n g\n"
        );
    }

    #[test]
    fn missing_golden_file_names_update_flag() {
        let error = compare(Path::new("/nowhere/golden.yaml"), "", "")
            .unwrap_err()
            .to_string();
        assert_eq!(
            error,
            "/nowhere/golden.yaml does not exist: write it with --update"
        );
    }
}
