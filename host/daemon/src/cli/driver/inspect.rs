//! `nodedock driver inspect`: all that can be said of a file, also of one that cannot be loaded.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use serde::Serialize;

use super::super::Outcome;
use super::super::output::{Format, Rows, print, printable, say};
use super::{grant_beside, look, read};
use crate::config::ConfigFile;
use nodedock_base::error::chain;
use nodedock_model::grant::{self, Grant, LimitGrant, LimitRequest};
use nodedock_model::limit;
use nodedock_wasm::trust::{Evidence, Policy, Verdict};
use nodedock_wasm::{DriverInfo, Inspection};

/// What the file's signature is checked with; neither: nothing is said of it.
pub(super) struct Vouching {
    pub(super) config: Option<PathBuf>,
    pub(super) key: Option<PathBuf>,
}

impl Vouching {
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
    /// Capabilities that it asks for.
    requests: Vec<Request>,
    /// File of the grant; none is the empty grant.
    grant: Option<String>,
    missing_grants: Vec<String>,
    limits: Option<Limits>,
    trust: Option<Trust>,
    error: Option<String>,
}

#[derive(Serialize)]
struct Request {
    request: String,
    granted: bool,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Limits {
    memory_mib: Limit,
    wall_ms: Limit,
    cpu_ms: Limit,
    answer_mib: Limit,
    host_operations: Limit,
    host_mib: Limit,
    log_lines_per_second: Limit,
    log_bytes_per_second: Limit,
    concurrent_calls: Limit,
}

/// What is not asked for or granted is the default. Only memory, wall time and CPU time can be asked for.
#[derive(Serialize)]
struct Limit {
    asked: Option<u32>,
    granted: Option<u32>,
    effective: u64,
}

#[derive(Serialize)]
struct Trust {
    mode: &'static str,
    verdict: &'static str,
    key: Option<String>,
    pin: Option<String>,
    reason: Option<String>,
    #[serde(skip)]
    refuses: bool,
}

impl From<Verdict> for Trust {
    fn from(verdict: Verdict) -> Self {
        Self {
            mode: verdict.mode.as_str(),
            verdict: verdict.word(),
            refuses: verdict.refuses(),
            reason: verdict.distrust.map(|distrust| distrust.to_string()),
            key: verdict.key,
            pin: verdict.pin,
        }
    }
}

pub(super) async fn run(
    file: &Path,
    grant: Option<PathBuf>,
    vouching: &Vouching,
    format: Format,
) -> Result<Outcome> {
    let policy = vouching.policy()?;
    let (grant, grant_path) = grant_beside(file, grant)?;
    let bytes = read(file, limit::DRIVER_FILE_BYTES_MAX)?;
    let verdict = policy.as_ref().map(|policy| judge(policy, file, &bytes)).transpose()?;
    let found = look(file, bytes, &grant).await?;
    // Before the name is known nothing is said of it; then all is.
    let verdict = match (policy, verdict, &found.info) {
        (Some(policy), Some(verdict), Some(info)) if verdict.distrust.is_none() => {
            Some(policy.judge_named(&verdict, info.name.as_str()))
        }
        (_, verdict, _) => verdict,
    };
    let inspected = inspected(file, &found, &grant, grant_path, verdict);
    match format {
        Format::Json | Format::Yaml => {
            print(format, &inspected, || Rows { heading: vec![], wide_from: 0, rows: vec![] }, "")?
        }
        Format::Table | Format::Wide => say(inspected.text().trim_end())?,
    }
    let refused = inspected.error.is_some() || inspected.trust.as_ref().is_some_and(|trust| trust.refuses);
    Ok(if refused { Outcome::Refused } else { Outcome::Done })
}

fn judge(policy: &Policy, file: &Path, bytes: &[u8]) -> Result<Verdict> {
    let mut beside = file.as_os_str().to_owned();
    beside.push(".sig");
    let beside = PathBuf::from(beside);
    let signature =
        if beside.exists() { Some(read(&beside, limit::SIGNATURE_FILE_BYTES_MAX)?) } else { None };
    let stem = file.file_stem().unwrap_or_default().to_string_lossy();
    Ok(policy.judge(&Evidence { stem: &stem, bytes, signature: signature.as_deref() }))
}

fn inspected(
    file: &Path,
    found: &Inspection,
    grant: &Grant,
    grant_path: Option<PathBuf>,
    verdict: Option<Verdict>,
) -> Inspected {
    let info = found.info.as_deref();
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
        requests: info.map(|info| requests(info, &found.missing_grants)).unwrap_or_default(),
        grant: grant_path.map(|path| path.display().to_string()),
        missing_grants: found.missing_grants.clone(),
        limits: info
            .zip(found.limits.as_ref())
            .map(|(info, effective)| Limits::new(&info.limits, &grant.limits, effective)),
        trust: verdict.map(Trust::from),
        error: found.error.as_ref().map(|error| chain(error)),
    }
}

/// Against the empty grant everything is missing, which is the list of what is asked for.
fn requests(info: &DriverInfo, missing: &[String]) -> Vec<Request> {
    let all = grant::missing(&info.capabilities, &LimitRequest::default(), &Grant::empty());
    all.into_iter().map(|request| Request { granted: !missing.contains(&request), request }).collect()
}

/// Lines of a label and a value.
#[derive(Default)]
struct Sheet(String);

impl Sheet {
    fn line(&mut self, label: &str, value: &str) {
        // Writing to a text does not fail.
        let _ = writeln!(self.0, "{label:<10}{}", printable(value));
    }

    fn lines(&mut self, label: &str, values: impl IntoIterator<Item = String>) {
        for (index, value) in values.into_iter().enumerate() {
            self.line(if index == 0 { label } else { "" }, &value);
        }
    }
}

impl Inspected {
    fn text(&self) -> String {
        let mut sheet = Sheet::default();
        sheet.line("file", &format!("{}, {} bytes", self.file, self.size));
        sheet.line("digest", &self.digest);
        sheet.line("form", self.form.unwrap_or("not WebAssembly"));
        sheet.line("contract", self.contract.as_deref().unwrap_or("none"));
        if let Some(profile) = self.profile {
            sheet.line("profile", profile);
        }
        sheet.lines("imports", self.imports.iter().cloned());
        sheet.lines("exports", self.exports.iter().cloned());
        if let (Some(name), Some(version)) = (&self.name, &self.version) {
            sheet.line("driver", &format!("{name} {version}"));
            sheet.line("summary", self.summary.as_deref().unwrap_or_default());
        }
        sheet.lines("asks for", self.requests.iter().map(Request::text));
        if let Some(limits) = &self.limits {
            sheet.lines("limits", limits.texts());
        }
        sheet.line("grant", self.grant.as_deref().unwrap_or("none: nothing but the log"));
        if let Some(trust) = &self.trust {
            sheet.line("trust", &trust.text());
        }
        self.verdict(&mut sheet);
        sheet.0
    }

    fn verdict(&self, sheet: &mut Sheet) {
        let distrust = self.trust.as_ref().filter(|trust| trust.refuses);
        match (&self.error, distrust, self.missing_grants.as_slice()) {
            (Some(error), _, _) => sheet.line("verdict", &format!("cannot be loaded: {error}")),
            (None, Some(_), _) => sheet.line("verdict", "would be refused: not trusted"),
            (None, None, []) => sheet.line("verdict", "would serve"),
            (None, None, missing) => {
                sheet.line("verdict", "would be blocked; not granted:");
                sheet.lines("", missing.iter().cloned());
            }
        }
    }
}

impl Request {
    fn text(&self) -> String {
        if self.granted { self.request.clone() } else { format!("{} (not granted)", self.request) }
    }
}

impl Limits {
    fn new(asked: &LimitRequest, granted: &LimitGrant, effective: &grant::Limits) -> Self {
        let limit = |asked, granted, effective| Limit { asked, granted, effective };
        let given = |granted, effective| limit(None, granted, effective);
        let mib = |bytes: usize| (bytes >> 20) as u64;
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        Self {
            memory_mib: limit(asked.memory_mib, granted.memory_mib, mib(effective.memory)),
            wall_ms: limit(asked.wall_ms, granted.wall_ms, millis(effective.wall)),
            cpu_ms: limit(asked.cpu_ms, granted.cpu_ms, millis(effective.cpu)),
            answer_mib: given(granted.answer_mib, mib(effective.hostcall_bytes)),
            host_operations: given(granted.host_operations, effective.host_operations as u64),
            host_mib: given(granted.host_mib, mib(effective.host_bytes)),
            log_lines_per_second: given(granted.log_lines_per_second, effective.log.lines.into()),
            log_bytes_per_second: given(granted.log_bytes_per_second, effective.log.bytes.into()),
            concurrent_calls: given(granted.concurrent_calls, effective.concurrent_calls as u64),
        }
    }

    fn texts(&self) -> Vec<String> {
        let or_default = |value: Option<u32>| value.map_or("default".to_owned(), |value| value.to_string());
        let asked = |what: &str, limit: &Limit, unit: &str| {
            let (asked, granted) = (or_default(limit.asked), or_default(limit.granted));
            format!("{what} {} {unit} (asked: {asked}, granted: {granted})", limit.effective)
        };
        let given = |what: &str, limit: &Limit, unit: &str| {
            format!("{what} {}{unit} (granted: {})", limit.effective, or_default(limit.granted))
        };
        vec![
            asked("memory", &self.memory_mib, "MiB"),
            asked("wall", &self.wall_ms, "ms per call"),
            asked("CPU", &self.cpu_ms, "ms per call"),
            given("answer", &self.answer_mib, " MiB"),
            given("questions to the host", &self.host_operations, " per call"),
            given("answers of the host", &self.host_mib, " MiB per call"),
            given("log lines", &self.log_lines_per_second, " a second"),
            given("log bytes", &self.log_bytes_per_second, " a second"),
            given("calls at once", &self.concurrent_calls, ""),
        ]
    }
}

impl Trust {
    fn text(&self) -> String {
        let mut text = format!("{} (mode {})", self.verdict, self.mode);
        if let Some(key) = &self.key {
            text.push_str(&format!(", signed by {key}"));
        }
        if let Some(pin) = &self.pin {
            text.push_str(&format!(", pinned for {pin}"));
        }
        if let Some(reason) = &self.reason {
            text.push_str(&format!(": {reason}"));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole() -> Inspected {
        let limit = |asked, granted, effective| Limit { asked, granted, effective };
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
            limits: Some(Limits {
                memory_mib: limit(Some(128), Some(256), 128),
                wall_ms: limit(None, None, 10_000),
                cpu_ms: limit(Some(500), None, 500),
                answer_mib: limit(None, None, 16),
                host_operations: limit(None, Some(500), 500),
                host_mib: limit(None, None, 64),
                log_lines_per_second: limit(None, None, 20),
                log_bytes_per_second: limit(None, None, 4096),
                concurrent_calls: limit(None, Some(2), 2),
            }),
            trust: Some(Trust {
                mode: "enforce",
                verdict: "trusted",
                key: Some("release".into()),
                pin: Some("gpu".into()),
                reason: None,
                refuses: false,
            }),
            error: None,
        }
    }

    #[test]
    fn the_text_is_aligned_and_says_everything_once() {
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
asks for  sysfsRead: class/drm/*
          env: GPU_* (not granted)
limits    memory 128 MiB (asked: 128, granted: 256)
          wall 10000 ms per call (asked: default, granted: default)
          CPU 500 ms per call (asked: 500, granted: default)
          answer 16 MiB (granted: default)
          questions to the host 500 per call (granted: 500)
          answers of the host 64 MiB per call (granted: default)
          log lines 20 a second (granted: default)
          log bytes 4096 a second (granted: default)
          calls at once 2 (granted: 2)
grant     gpu.grant.yaml
trust     trusted (mode enforce), signed by release, pinned for gpu
verdict   would be blocked; not granted:
          env: GPU_*
";
        assert_eq!(whole().text(), expected);
    }

    #[test]
    fn of_a_file_that_cannot_be_loaded_what_is_known_is_said() {
        let inspected = Inspected {
            file: "x.wasm".into(),
            form: None,
            contract: None,
            profile: None,
            imports: vec![],
            exports: vec![],
            name: None,
            requests: vec![],
            grant: None,
            missing_grants: vec![],
            limits: None,
            trust: Some(Trust {
                mode: "enforce",
                verdict: "distrusted",
                key: None,
                pin: None,
                reason: Some("it is not signed".into()),
                refuses: true,
            }),
            error: Some("it is empty".into()),
            ..whole()
        };
        let expected = "\
file      x.wasm, 1234 bytes
digest    sha256:00
form      not WebAssembly
contract  none
grant     none: nothing but the log
trust     distrusted (mode enforce): it is not signed
verdict   cannot be loaded: it is empty
";
        assert_eq!(inspected.text(), expected);
        let sound = Inspected { error: None, ..inspected };
        assert!(sound.text().ends_with("verdict   would be refused: not trusted\n"));
    }
}
