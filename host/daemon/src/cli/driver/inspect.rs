//! `nodedock driver inspect`: everything that a driver file shows of itself, also if it cannot be loaded.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use nodedock_proto::node::v1::DriverTrust;
use serde::{Serialize, Serializer};

use super::super::output::{Format, join, print};
use super::super::{Outcome, describe};
use super::{grant_beside, load, read};
use crate::config::ConfigFile;
use crate::convert;
use nodedock_base::error::chain;
use nodedock_model::grant::{self, Grant, LimitGrant, LimitRequest};
use nodedock_model::limit;
use nodedock_wasm::trust::{Policy, Verdict};
use nodedock_wasm::{DriverInfo, Inspection};

#[derive(Args)]
pub(in crate::cli) struct InspectArgs {
    file: PathBuf,
    /// Grant to compare with [default: NAME.grant.yaml beside NAME.wasm, if it exists]
    #[arg(long, value_name = "FILE")]
    grant: Option<PathBuf>,
    /// Check whether the `trust` section of this config file of the daemon trusts the file
    #[arg(long, value_name = "FILE", conflicts_with = "key")]
    config: Option<PathBuf>,
    /// Check the signature beside the file, NAME.wasm.sig, with this public key (PEM)
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,
}

impl InspectArgs {
    /// The policy that the file's signature is checked with; without one nothing is checked.
    fn policy(&self) -> Result<Option<Policy>> {
        match (&self.config, &self.key) {
            (Some(config), _) => Ok(Some(ConfigFile::read(config)?.policy)),
            (None, Some(key)) => {
                Policy::of_key_file(key).map(Some).with_context(|| format!("key {}", key.display()))
            }
            (None, None) => Ok(None),
        }
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Inspected {
    file: String,
    size: usize,
    digest: String,
    form: Option<&'static str>,
    contract: Option<String>,
    profile: Option<&'static str>,
    imports: Vec<String>,
    exports: Vec<String>,
    facets: Vec<&'static str>,
    name: Option<String>,
    version: Option<String>,
    summary: Option<String>,
    /// Capabilities that it requests.
    requests: Vec<Request>,
    /// File of the grant; none is the empty grant.
    grant: Option<String>,
    missing_grants: Vec<String>,
    #[serde(serialize_with = "by_key")]
    limits: Option<[Limit; 9]>,
    #[serde(serialize_with = "with_nulls")]
    trust: Option<DriverTrust>,
    #[serde(skip)]
    distrusted: bool,
    error: Option<String>,
}

#[derive(Serialize)]
struct Request {
    request: String,
    granted: bool,
}

/// A limit that is neither requested nor granted has its default.
#[derive(Serialize)]
struct Limit {
    #[serde(skip)]
    key: &'static str,
    #[serde(skip)]
    label: &'static str,
    #[serde(skip)]
    unit: &'static str,
    /// Whether a driver can request it.
    #[serde(skip)]
    can_ask: bool,
    asked: Option<u32>,
    granted: Option<u32>,
    effective: u64,
}

fn by_key<S: Serializer>(limits: &Option<[Limit; 9]>, serializer: S) -> Result<S::Ok, S::Error> {
    match limits {
        Some(limits) => serializer.collect_map(limits.iter().map(|limit| (limit.key, limit))),
        None => serializer.serialize_none(),
    }
}

/// Writes empty texts as null.
fn with_nulls<S: Serializer>(trust: &Option<DriverTrust>, serializer: S) -> Result<S::Ok, S::Error> {
    let Some(DriverTrust { mode, verdict, key, pin, reason }) = trust else {
        return serializer.serialize_none();
    };
    let fields = [("mode", mode), ("verdict", verdict), ("key", key), ("pin", pin), ("reason", reason)];
    let value = |text: &'_ String| Some(text.clone()).filter(|text| !text.is_empty());
    serializer.collect_map(fields.map(|(key, text)| (key, value(text))))
}

pub(super) async fn run(args: InspectArgs) -> Result<Outcome> {
    let (policy, file) = (args.policy()?, args.file.as_path());
    let (grant, grant_path) = grant_beside(file, args.grant.as_deref())?;
    let bytes = read(file, limit::DRIVER_FILE_BYTES_MAX)?;
    let verdict = policy.as_ref().map(|policy| judge(policy, file, &bytes)).transpose()?;
    let found = load(file, bytes, &grant).await?;
    // A pin may be for the driver's name, which is known now.
    let verdict = match (policy, verdict, &found.driver) {
        (Some(policy), Some(verdict), Ok(driver)) if verdict.distrust.is_none() => {
            Some(policy.judge_named(&verdict, driver.info().name.as_str()))
        }
        (_, verdict, _) => verdict,
    };
    let inspected = inspected(file, &found, &grant, grant_path, verdict);
    print(args.output, &inspected, || join(inspected.lines()))?;
    let refused = inspected.error.is_some() || inspected.distrusted;
    Ok(if refused { Outcome::Refused } else { Outcome::Done })
}

fn judge(policy: &Policy, file: &Path, bytes: &[u8]) -> Result<Verdict> {
    let mut beside = file.as_os_str().to_owned();
    beside.push(".sig");
    let beside = PathBuf::from(beside);
    let signature =
        if beside.exists() { Some(read(&beside, limit::SIGNATURE_FILE_BYTES_MAX)?) } else { None };
    let stem = file.file_stem().unwrap_or_default().to_string_lossy();
    Ok(policy.judge(&stem, bytes, signature.as_deref()))
}

fn inspected(
    file: &Path,
    found: &Inspection,
    grant: &Grant,
    grant_path: Option<PathBuf>,
    verdict: Option<Verdict>,
) -> Inspected {
    let driver = found.driver.as_ref().ok();
    let info = driver.map(|driver| driver.info());
    let missing_grants = driver.map(|driver| driver.missing_grants().to_vec()).unwrap_or_default();
    Inspected {
        file: file.display().to_string(),
        size: found.size,
        digest: found.digest.clone(),
        form: found.surface.form.map(|form| form.as_str()),
        contract: found.surface.contract(),
        profile: found.surface.profile().map(|profile| profile.as_str()),
        imports: found.surface.imports.iter().cloned().collect(),
        exports: found.surface.exports.iter().cloned().collect(),
        facets: found.surface.facets(),
        name: info.map(|info| info.name.to_string()),
        version: info.map(|info| info.version.clone()),
        summary: info.map(|info| info.summary.clone()),
        requests: info.map(|info| requests(info, &missing_grants)).unwrap_or_default(),
        grant: grant_path.map(|path| path.display().to_string()),
        missing_grants,
        limits: driver.map(|driver| limits(&driver.info().limits, &grant.limits, &driver.limits())),
        distrusted: verdict.as_ref().is_some_and(Verdict::refuses),
        trust: verdict.as_ref().map(|verdict| convert::trust(&verdict.view())),
        error: found.driver.as_ref().err().map(|error| chain(error)),
    }
}

/// Against the empty grant every request is missing, which is the list of all requests.
fn requests(info: &DriverInfo, missing: &[String]) -> Vec<Request> {
    let all = grant::missing(&info.capabilities, &LimitRequest::default(), &Grant::empty());
    all.into_iter().map(|request| Request { granted: !missing.contains(&request), request }).collect()
}

fn limits(asked: &LimitRequest, granted: &LimitGrant, effective: &grant::Limits) -> [Limit; 9] {
    let new = |key, label, unit, granted, effective| Limit {
        key,
        label,
        unit,
        can_ask: false,
        asked: None,
        granted,
        effective,
    };
    let or_asked = |asked, limit| Limit { can_ask: true, asked, ..limit };
    let mib = |bytes: usize| (bytes >> 20) as u64;
    let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let (e, g, log) = (effective, granted, &effective.log);
    [
        or_asked(asked.memory_mib, new("memoryMib", "memory", " MiB", g.memory_mib, mib(e.memory))),
        or_asked(asked.wall_ms, new("wallMs", "wall", " ms per call", g.wall_ms, millis(e.wall))),
        or_asked(asked.cpu_ms, new("cpuMs", "CPU", " ms per call", g.cpu_ms, millis(e.cpu))),
        new("answerMib", "answer", " MiB", g.answer_mib, mib(e.hostcall_bytes)),
        new("hostOperations", "host calls", " per call", g.host_operations, e.host_operations as u64),
        new("hostMib", "answers of host calls", " MiB per call", g.host_mib, mib(e.host_bytes)),
        new("logLinesPerSecond", "log lines", " a second", g.log_lines_per_second, log.lines.into()),
        new("logBytesPerSecond", "log bytes", " a second", g.log_bytes_per_second, log.bytes.into()),
        new("concurrentCalls", "concurrent calls", "", g.concurrent_calls, e.concurrent_calls as u64),
    ]
}

/// Labels the first of several values.
fn labelled(label: &str, values: impl IntoIterator<Item = String>) -> Vec<String> {
    let label = std::iter::once(label).chain(std::iter::repeat(""));
    label.zip(values).map(|(label, value)| format!("{label:<10}{value}")).collect()
}

impl Inspected {
    fn lines(&self) -> Vec<String> {
        let one = |label: &str, value: Option<String>| labelled(label, value);
        let driver = self.name.as_ref().zip(self.version.as_ref());
        let sections = [
            one("file", Some(format!("{}, {} bytes", self.file, self.size))),
            one("digest", Some(self.digest.clone())),
            one("form", Some(self.form.unwrap_or("not WebAssembly").to_owned())),
            one("contract", Some(self.contract.clone().unwrap_or_else(|| "none".to_owned()))),
            one("profile", self.profile.map(str::to_owned)),
            labelled("imports", self.imports.iter().cloned()),
            labelled("exports", self.exports.iter().cloned()),
            one("driver", driver.map(|(name, version)| format!("{name} {version}"))),
            one("summary", self.summary.clone()),
            labelled("requests", self.requests.iter().map(Request::text)),
            labelled("limits", self.limits.iter().flatten().map(Limit::text)),
            one(
                "grant",
                Some(self.grant.clone().unwrap_or_else(|| "none: only the log is granted".to_owned())),
            ),
            one("trust", self.trust.as_ref().map(describe::trust)),
            labelled("verdict", self.verdict()),
        ];
        sections.concat()
    }

    fn verdict(&self) -> Vec<String> {
        if let Some(error) = &self.error {
            return vec![format!("cannot be loaded: {error}")];
        }
        match self.missing_grants.as_slice() {
            _ if self.distrusted => vec!["would be refused: not trusted".to_owned()],
            [] => vec!["would serve".to_owned()],
            missing => [&["would be blocked; not granted:".to_owned()], missing].concat(),
        }
    }
}

impl Request {
    fn text(&self) -> String {
        if self.granted { self.request.clone() } else { format!("{} (not granted)", self.request) }
    }
}

impl Limit {
    fn text(&self) -> String {
        let or_default = |value: Option<u32>| value.map_or("default".to_owned(), |value| value.to_string());
        let Self { label, unit, effective, .. } = self;
        let asked =
            if self.can_ask { format!("requested: {}, ", or_default(self.asked)) } else { String::new() };
        format!("{label} {effective}{unit} ({asked}granted: {})", or_default(self.granted))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole() -> Inspected {
        let asked = LimitRequest { memory_mib: Some(128), cpu_ms: Some(500), ..LimitRequest::default() };
        let granted = LimitGrant {
            memory_mib: Some(256),
            host_operations: Some(500),
            concurrent_calls: Some(2),
            ..LimitGrant::default()
        };
        let effective = grant::Limits::new(&asked, &granted);
        Inspected {
            file: "gpu.wasm".into(),
            size: 1234,
            digest: "sha256:00".into(),
            form: Some("core module"),
            contract: Some("nodedock:driver@0.1.0".into()),
            profile: Some("pure"),
            imports: vec!["nodedock:driver/log@0.1.0".into(), "nodedock:driver/sysfs@0.1.0".into()],
            exports: vec!["nodedock:driver/identity@0.1.0".into()],
            facets: vec![],
            name: Some("gpu.example.com".into()),
            version: Some("1.2.3".into()),
            summary: Some("GPUs\u{1b}[2J".into()),
            requests: vec![
                Request { request: "sysfsRead: class/drm/*".into(), granted: true },
                Request { request: "env: GPU_*".into(), granted: false },
            ],
            grant: Some("gpu.grant.yaml".into()),
            missing_grants: vec!["env: GPU_*".into()],
            limits: Some(limits(&asked, &granted, &effective)),
            trust: Some(DriverTrust {
                mode: "enforce".into(),
                verdict: "trusted".into(),
                key: "release".into(),
                pin: "gpu".into(),
                reason: String::new(),
            }),
            distrusted: false,
            error: None,
        }
    }

    #[test]
    fn the_text_is_aligned_and_has_everything_once() {
        let expected = "\
file      gpu.wasm, 1234 bytes
digest    sha256:00
form      core module
contract  nodedock:driver@0.1.0
profile   pure
imports   nodedock:driver/log@0.1.0
          nodedock:driver/sysfs@0.1.0
exports   nodedock:driver/identity@0.1.0
driver    gpu.example.com 1.2.3
summary   GPUs\u{fffd}[2J
requests  sysfsRead: class/drm/*
          env: GPU_* (not granted)
limits    memory 128 MiB (requested: 128, granted: 256)
          wall 10000 ms per call (requested: default, granted: default)
          CPU 500 ms per call (requested: 500, granted: default)
          answer 16 MiB (granted: default)
          host calls 500 per call (granted: 500)
          answers of host calls 16 MiB per call (granted: default)
          log lines 50 a second (granted: default)
          log bytes 65536 a second (granted: default)
          concurrent calls 2 (granted: 2)
grant     gpu.grant.yaml
trust     trusted (mode enforce), signed by release, pinned for gpu
verdict   would be blocked; not granted:
          env: GPU_*
";
        assert_eq!(join(whole().lines()), expected.trim_end());
    }
}
