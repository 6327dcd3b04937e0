//! `nodedock driver inspect`: everything that a driver file shows of itself, also if it cannot be loaded.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;
use nodedock_proto::node::v1::DriverTrust;
use serde::{Serialize, Serializer};
use serde_json::Value;

use super::{grant_beside, load, read, write_file};
use nodedock_base::error::chain;
use nodedock_command::output::{Format, join, print};
use nodedock_command::{CommandError, describe};
use nodedock_model::grant::{self, Grant, LimitKey, LimitValues};
use nodedock_model::{Problem, limit};
use nodedock_wasm::trust::{Policy, TrustDecision};
use nodedock_wasm::{DriverInfo, Inspection};
use nodedockd::config::ConfigFile;
use nodedockd::convert;

#[derive(Args)]
pub struct InspectArgs {
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
    /// Write the JSON Schema of the driver's parameters in claims and classes to this file, for editors
    #[arg(long, value_name = "FILE")]
    parameters_schema: Option<PathBuf>,
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,
}

impl InspectArgs {
    /// The policy that the file's signature is checked with; without one nothing is checked.
    fn policy(&self) -> Result<Option<Policy>> {
        match (&self.config, &self.key) {
            (Some(config), _) => Ok(Some(ConfigFile::read(config)?.policy)),
            (None, Some(key)) => Policy::of_key_file(key)
                .map(Some)
                .with_context(|| format!("key {}", key.display())),
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
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    annotations: BTreeMap<String, String>,
    /// JSON Schema of the parameters in claims and classes; none if it has none.
    parameters_schema: Option<Value>,
    /// Capabilities that it requests.
    requests: Vec<Request>,
    /// File of the grant; none is the empty grant.
    grant: Option<String>,
    missing_grants: Vec<String>,
    #[serde(serialize_with = "by_key")]
    limits: Option<Vec<Limit>>,
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
    key: LimitKey,
    asked: Option<u32>,
    granted: Option<u32>,
    effective: u32,
}

fn by_key<S: Serializer>(limits: &Option<Vec<Limit>>, serializer: S) -> Result<S::Ok, S::Error> {
    match limits {
        Some(limits) => serializer.collect_map(
            limits
                .iter()
                .map(|limit| (limit.key.to_string().replace("MiB", "Mib"), limit)),
        ),
        None => serializer.serialize_none(),
    }
}

/// Writes empty texts as null.
fn with_nulls<S: Serializer>(
    trust: &Option<DriverTrust>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    let Some(DriverTrust {
        mode,
        verdict,
        key,
        pin,
        reason,
    }) = trust
    else {
        return serializer.serialize_none();
    };
    let fields = [
        ("mode", mode),
        ("verdict", verdict),
        ("key", key),
        ("pin", pin),
        ("reason", reason),
    ];
    serializer
        .collect_map(fields.map(|(key, text)| (key, Some(text).filter(|text| !text.is_empty()))))
}

pub(super) async fn run(args: InspectArgs) -> Result<()> {
    let (policy, file) = (args.policy()?, args.file.as_path());
    let (grant, grant_path) = grant_beside(file, args.grant.as_deref())?;
    let bytes = read(file, limit::DRIVER_FILE_BYTES_MAX)?;
    let verdict = policy
        .as_ref()
        .map(|policy| judge(policy, file, &bytes))
        .transpose()?;
    let found = load(file, bytes, &grant).await?;
    let schema = match &found.driver {
        Ok(driver) => driver.parameters_schema(&driver.look_call()).await,
        Err(_) => Ok(None),
    };
    // A pin may be for the driver's name, which is known now.
    let verdict = match (policy, verdict, &found.driver) {
        (Some(policy), Some(verdict), Ok(driver)) if verdict.distrust.is_none() => {
            Some(policy.judge_named(&verdict, driver.info().name.as_str()))
        }
        (_, verdict, _) => verdict,
    };
    let inspected = inspected(file, &found, schema, &grant, grant_path, verdict);
    if let Some(path) = &args.parameters_schema {
        write_schema(path, &inspected)?;
    }
    print(args.output, &inspected, || join(inspected.lines()))?;
    let refused = inspected.error.is_some() || inspected.distrusted;
    CommandError::unless_done(!refused)
}

fn write_schema(path: &Path, inspected: &Inspected) -> Result<()> {
    let schema = match (&inspected.parameters_schema, &inspected.error) {
        (Some(schema), _) => schema,
        (None, Some(error)) => bail!("{} cannot be loaded: {error}", inspected.file),
        (None, None) => bail!("{} has no schema of parameters", inspected.file),
    };
    let text = serde_json::to_string_pretty(schema).context("write the schema")? + "\n";
    write_file(path, text.as_bytes())
}

fn judge(policy: &Policy, file: &Path, bytes: &[u8]) -> Result<TrustDecision> {
    let mut beside = file.as_os_str().to_owned();
    beside.push(".sig");
    let beside = PathBuf::from(beside);
    let signature = if beside.try_exists()? {
        Some(read(&beside, limit::SIGNATURE_FILE_BYTES_MAX)?)
    } else {
        None
    };
    let stem = file.file_stem().unwrap_or_default().to_string_lossy();
    Ok(policy.judge(&stem, bytes, signature.as_deref()))
}

fn inspected(
    file: &Path,
    found: &Inspection,
    schema: Result<Option<Value>, Problem>,
    grant: &Grant,
    grant_path: Option<PathBuf>,
    verdict: Option<TrustDecision>,
) -> Inspected {
    let driver = found.driver.as_ref().ok();
    let info = driver.map(|driver| driver.info());
    let missing_grants = driver
        .map(|driver| driver.missing_grants().to_vec())
        .unwrap_or_default();
    let (parameters_schema, broken) = match schema {
        Ok(schema) => (schema, None),
        Err(problem) => (None, Some(problem.message)),
    };
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
        annotations: info
            .map(|info| info.annotations.clone())
            .unwrap_or_default(),
        parameters_schema,
        requests: info
            .map(|info| requests(info, &missing_grants))
            .unwrap_or_default(),
        grant: grant_path.map(|path| path.display().to_string()),
        missing_grants,
        limits: driver.map(|driver| limits(&driver.info().limits, &grant.limits)),
        distrusted: verdict.as_ref().is_some_and(TrustDecision::refuses),
        trust: verdict
            .as_ref()
            .map(|verdict| convert::trust(&verdict.view())),
        error: found
            .driver
            .as_ref()
            .err()
            .map(|error| chain(error))
            .or(broken),
    }
}

/// Returns all requests. Against the empty grant every request is missing.
fn requests(info: &DriverInfo, missing: &[String]) -> Vec<Request> {
    let all = grant::missing(&info.capabilities, &LimitValues::new(), &Grant::empty());
    all.into_iter()
        .map(|request| Request {
            granted: !missing.contains(&request),
            request,
        })
        .collect()
}

fn limits(asked: &LimitValues, granted: &LimitValues) -> Vec<Limit> {
    LimitKey::ALL
        .iter()
        .map(|key| Limit {
            key: *key,
            asked: asked.get(key).copied(),
            granted: granted.get(key).copied(),
            effective: key.effective(asked, granted),
        })
        .collect()
}

/// Labels the first of several values.
pub(super) fn labelled(label: &str, values: impl IntoIterator<Item = String>) -> Vec<String> {
    let label = std::iter::once(label).chain(std::iter::repeat(""));
    label
        .zip(values)
        .map(|(label, value)| format!("{label:<10}{value}"))
        .collect()
}

impl Inspected {
    fn lines(&self) -> Vec<String> {
        let driver = self.name.as_ref().zip(self.version.as_ref());
        let sections = [
            labelled("file", Some(format!("{}, {} bytes", self.file, self.size))),
            labelled("digest", Some(self.digest.clone())),
            labelled(
                "form",
                Some(self.form.unwrap_or("not WebAssembly").to_owned()),
            ),
            labelled(
                "contract",
                Some(self.contract.clone().unwrap_or_else(|| "none".to_owned())),
            ),
            labelled("profile", self.profile.map(str::to_owned)),
            labelled("imports", self.imports.iter().cloned()),
            labelled("exports", self.exports.iter().cloned()),
            labelled("facets", self.facets()),
            labelled(
                "driver",
                driver.map(|(name, version)| format!("{name} {version}")),
            ),
            labelled("summary", self.summary.clone()),
            labelled("metadata", self.metadata_lines()),
            labelled("schema", self.schema_lines()),
            labelled("requests", self.requests.iter().map(Request::text)),
            labelled("limits", self.limits.iter().flatten().map(Limit::text)),
            labelled(
                "grant",
                Some(
                    self.grant
                        .clone()
                        .unwrap_or_else(|| "none: only the log is granted".to_owned()),
                ),
            ),
            labelled("trust", self.trust.as_ref().map(describe::trust)),
            labelled("verdict", self.verdict()),
        ];
        sections.concat()
    }

    /// The optional interfaces among the exports, in one line.
    fn facets(&self) -> Option<String> {
        let names = self.facets.join(", ");
        let shown = if names.is_empty() {
            "none".to_owned()
        } else {
            names
        };
        self.contract.is_some().then_some(shown)
    }

    /// The driver's annotations.
    fn metadata_lines(&self) -> Vec<String> {
        let annotations = self.annotations.iter();
        annotations
            .map(|(key, value)| format!("{key}: {value}"))
            .collect()
    }

    /// The schema of the parameters, indented.
    fn schema_lines(&self) -> Vec<String> {
        let Some(schema) = &self.parameters_schema else {
            return Vec::new();
        };
        let text = format!("of the parameters in claims and classes:\n{schema:#}");
        text.lines().map(str::to_owned).collect()
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
        if self.granted {
            self.request.clone()
        } else {
            format!("{} (not granted)", self.request)
        }
    }
}

impl Limit {
    fn text(&self) -> String {
        let Self {
            key,
            asked,
            granted,
            effective,
        } = self;
        let (label, unit) = match key {
            LimitKey::MemoryMiB => ("memory", " MiB"),
            LimitKey::WallMs => ("wall", " ms per call"),
            LimitKey::CpuMs => ("CPU", " ms per call"),
            LimitKey::AnswerMiB => ("answer", " MiB"),
            LimitKey::HostOperations => ("host calls", " per call"),
            LimitKey::HostMiB => ("answers of host calls", " MiB per call"),
            LimitKey::LogLinesPerSecond => ("log lines", " a second"),
            LimitKey::LogBytesPerSecond => ("log bytes", " a second"),
            LimitKey::ConcurrentCalls => ("concurrent calls", ""),
        };
        let asked = key
            .can_be_requested()
            .then(|| format!("requested: {}, ", or_default(*asked)));
        let asked = asked.unwrap_or_default();
        format!(
            "{label} {effective}{unit} ({asked}granted: {})",
            or_default(*granted)
        )
    }
}

fn or_default(value: Option<u32>) -> String {
    value.map_or("default".to_owned(), |value| value.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole() -> Inspected {
        let asked = grant::requested_limits(Some(128), None, Some(500), None);
        let granted = LimitValues::from([
            (LimitKey::MemoryMiB, 256),
            (LimitKey::HostOperations, 500),
            (LimitKey::ConcurrentCalls, 2),
        ]);
        Inspected {
            file: "gpu.wasm".into(),
            size: 1234,
            digest: "sha256:00".into(),
            form: Some("core module"),
            contract: Some("nodedock:driver@0.1.0".into()),
            profile: Some("pure"),
            imports: vec![
                "nodedock:driver/log@0.1.0".into(),
                "nodedock:driver/sysfs@0.1.0".into(),
            ],
            exports: vec![
                "nodedock:driver/health@0.1.0".into(),
                "nodedock:driver/identity@0.1.0".into(),
            ],
            facets: vec!["health"],
            name: Some("gpu.example.com".into()),
            version: Some("1.2.3".into()),
            summary: Some("GPUs\u{1b}[2J".into()),
            annotations: [("language".to_owned(), "rust".to_owned())].into(),
            parameters_schema: Some(serde_json::json!({"type": "object"})),
            requests: vec![
                Request {
                    request: "sysfsRead: class/drm/*".into(),
                    granted: true,
                },
                Request {
                    request: "env: GPU_*".into(),
                    granted: false,
                },
            ],
            grant: Some("gpu.grant.yaml".into()),
            missing_grants: vec!["env: GPU_*".into()],
            limits: Some(limits(&asked, &granted)),
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
    fn inspect_output_is_aligned_and_complete() {
        let expected = "\
file      gpu.wasm, 1234 bytes
digest    sha256:00
form      core module
contract  nodedock:driver@0.1.0
profile   pure
imports   nodedock:driver/log@0.1.0
          nodedock:driver/sysfs@0.1.0
exports   nodedock:driver/health@0.1.0
          nodedock:driver/identity@0.1.0
facets    health
driver    gpu.example.com 1.2.3
summary   GPUs\u{fffd}[2J
metadata  language: rust
schema    of the parameters in claims and classes:
          {
            \"type\": \"object\"
          }
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
          concurrent calls 2 (requested: default, granted: 2)
grant     gpu.grant.yaml
trust     trusted (mode enforce), signed by release, pinned for gpu
verdict   would be blocked; not granted:
          env: GPU_*
";
        assert_eq!(join(whole().lines()), expected.trim_end());
        let facets = |facets, contract| {
            let inspected = Inspected {
                facets,
                contract,
                ..whole()
            };
            inspected.facets()
        };
        let contract = || Some("nodedock:driver@0.2.0".to_owned());
        assert_eq!(
            facets(vec!["health", "scheduling"], contract()).as_deref(),
            Some("health, scheduling")
        );
        assert_eq!(facets(vec![], contract()).as_deref(), Some("none"));
        assert_eq!(facets(vec![], None), None);
    }
}
