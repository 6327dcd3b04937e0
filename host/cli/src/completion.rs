//! Shell completion: the script of a shell, and the names of objects that a running daemon has.
//!
//! The script calls this program for each completion, with the words of the command line behind `--`. Nothing is printed but what completes
//! the word: a daemon that does not run, or not answer in time, has no names.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Command;
use clap_complete::env::Shells;
use clap_complete::{ArgValueCandidates, CompleteEnv, CompletionCandidate, Shell};
use nodedock_proto::node::v1;
use serde_json::Value;
use tokio::time::timeout;

use super::client::{Client, connect};
use super::output::{print_error, print_text};
use super::{Location, block_on, local_api};
use nodedock_kube::extended_resources::class_name;
use nodedock_model::{DriverName, ExtendedResource};

/// Names the shell, in the environment of a call by its script.
const VARIABLE: &str = "NODEDOCK_COMPLETE";

/// Time for the names, for which a person waits at the prompt.
const NAMES_TIMEOUT: Duration = Duration::from_secs(1);

/// Objects whose names complete an argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Named {
    /// Prepared claims, and those of the local API.
    Claims,
    ApiClaims,
    Drivers,
    /// As `[NODE/]POOL/DEVICE`.
    Devices,
    /// As `DRIVER/[NODE/]POOL/DEVICE`.
    WholeDevices,
    Pods,
    Resources,
    Classes,
    Manifests,
    Slices,
    Adapters,
    Node,
}

impl Named {
    /// Returns the objects that `get` lists by a word.
    pub(super) fn of_word(word: &str) -> Option<Self> {
        Some(match word {
            "drivers" | "driver" => Self::Drivers,
            "devices" | "device" => Self::Devices,
            "claims" | "claim" => Self::Claims,
            "pods" | "pod" => Self::Pods,
            "resources" | "resource" => Self::Resources,
            "deviceclasses" | "deviceclass" => Self::Classes,
            "classmanifests" | "classmanifest" => Self::Manifests,
            "slices" | "slice" => Self::Slices,
            "adapters" | "adapter" => Self::Adapters,
            "node" => Self::Node,
            _ => return None,
        })
    }

    /// Returns what completes an argument that is the name of such an object.
    pub(super) fn candidates(self) -> ArgValueCandidates {
        ArgValueCandidates::new(move || candidates(self, &words()))
    }
}

/// Returns what completes the name of an object of `get`, by the word before it.
pub(super) fn candidates_of_get() -> ArgValueCandidates {
    ArgValueCandidates::new(|| {
        let words = words();
        let named = named_by_get(&words);
        named.map_or_else(Vec::new, |named| candidates(named, &words))
    })
}

/// Answers a call by the script of a shell. `None`: it is a command.
pub(super) fn answer(cli: fn() -> Command) -> Option<ExitCode> {
    // no error: a shell in a directory that is gone has no paths to complete
    let directory = std::env::current_dir().ok();
    let environment = CompleteEnv::with_factory(cli).var(VARIABLE);
    match environment.try_complete(std::env::args_os(), directory.as_deref()) {
        Ok(false) => None,
        Ok(true) => Some(ExitCode::SUCCESS),
        Err(error) => {
            print_error(&format!("error: {error}"));
            Some(ExitCode::FAILURE)
        }
    }
}

/// Prints the script of a shell.
pub(super) fn print_script(shell: Shell) -> Result<()> {
    let shells = Shells::builtins();
    let shell = shells
        .completer(&shell.to_string())
        .with_context(|| format!("there is no completion for {shell}"))?;
    let mut script = Vec::new();
    shell
        .write_registration(VARIABLE, "nodedock", "nodedock", "nodedock", &mut script)
        .context("write the script")?;
    let script = String::from_utf8(script).context("write the script")?;
    print_text(script.trim_end())
}

/// The words of the command line that is completed.
fn words() -> Vec<String> {
    let behind = std::env::args_os().skip_while(|word| word != "--").skip(1);
    behind
        .map(|word| word.to_string_lossy().into_owned())
        .collect()
}

fn named_by_get(words: &[String]) -> Option<Named> {
    let mut behind = words.iter().skip_while(|word| *word != "get").skip(1);
    behind.find_map(|word| Named::of_word(word))
}

/// Returns the daemon that the words name, or the environment.
fn location(words: &[String], root: Option<PathBuf>) -> Location {
    let default = Location::default();
    let given = value_of(words, "--root").map(PathBuf::from);
    Location {
        root: given.or(root).unwrap_or(default.root),
        socket: value_of(words, "--socket").map(PathBuf::from),
    }
}

/// The value of an option: `--option VALUE` or `--option=VALUE`, which bash splits at the `=`.
fn value_of<'a>(words: &'a [String], option: &str) -> Option<&'a str> {
    let mut rest = words.iter().map(String::as_str);
    let inline = |word: &'a str| word.strip_prefix(option)?.strip_prefix('=');
    loop {
        let word = rest.next()?;
        if word == option {
            return rest.find(|value| *value != "=");
        }
        if let Some(value) = inline(word) {
            return Some(value);
        }
    }
}

fn candidates(named: Named, words: &[String]) -> Vec<CompletionCandidate> {
    let root = std::env::var_os("NODEDOCK_ROOT").map(PathBuf::from);
    let location = location(words, root);
    let found = block_on(async {
        let names = timeout(NAMES_TIMEOUT, names(&location, named));
        names.await.context("the daemon does not answer")?
    });
    // no error: a message would be in the middle of the command line that is typed
    let names = found.unwrap_or_default();
    names.into_iter().map(CompletionCandidate::new).collect()
}

async fn names(location: &Location, named: Named) -> Result<BTreeSet<String>> {
    match named {
        Named::Classes => {
            let classes = local_api::connect(location).await?.device_classes().await?;
            Ok(object_names(&classes))
        }
        Named::Slices => {
            let slices = local_api::connect(location).await?.slices().await?;
            Ok(object_names(&slices))
        }
        Named::ApiClaims => api_claims(location).await,
        Named::Claims => {
            let mut claims = api_claims(location).await?;
            let request = v1::ListClaimsRequest::default();
            let answer = connect(location).await?.list_claims(request).await?;
            let ids = answer.into_inner().claims.into_iter();
            let default = local_api::namespace(location);
            let ids = ids.filter_map(|claim| claim.id);
            claims.extend(ids.map(|id| short(&id.namespace, &id.name, &default)));
            Ok(claims)
        }
        _ => of_daemon(connect(location).await?, named).await,
    }
}

async fn api_claims(location: &Location) -> Result<BTreeSet<String>> {
    let default = local_api::namespace(location);
    let claims = local_api::claims(location).await?;
    let names = claims.iter().map(|claim| {
        let [namespace, name] =
            ["/metadata/namespace", "/metadata/name"].map(|field| local_api::text(claim, field));
        short(namespace, name, &default)
    });
    Ok(names.collect())
}

async fn of_daemon(mut client: Client, named: Named) -> Result<BTreeSet<String>> {
    Ok(match named {
        Named::Drivers => {
            let request = v1::ListDriversRequest::default();
            let drivers = client.list_drivers(request).await?.into_inner().drivers;
            let names = drivers
                .into_iter()
                .map(|driver| match driver.name.is_empty() {
                    true => driver.source,
                    false => driver.name,
                });
            names.collect()
        }
        Named::Devices | Named::WholeDevices => {
            let request = v1::ListDevicesRequest::default();
            let devices = client.list_devices(request).await?.into_inner().devices;
            let names = devices.into_iter().map(|device| {
                let v1::Device {
                    driver, pool, name, ..
                } = device;
                match named {
                    Named::WholeDevices => format!("{driver}/{pool}/{name}"),
                    _ => format!("{pool}/{name}"),
                }
            });
            names.collect()
        }
        Named::Pods => {
            let pods = client.list_pods(v1::ListPodsRequest {}).await?.into_inner();
            let pods = pods.pods.into_iter().filter_map(|status| status.pod);
            pods.map(|pod| format!("{}/{}", pod.namespace, pod.name))
                .collect()
        }
        Named::Resources | Named::Manifests => {
            let request = v1::GetCapacityRequest {};
            let resources = client.get_capacity(request).await?.into_inner().resources;
            let names = resources.into_iter().filter_map(|resource| match named {
                Named::Manifests => manifest(&resource),
                _ => Some(resource.name),
            });
            names.collect()
        }
        Named::Adapters => {
            let request = v1::ListAdaptersRequest {};
            let adapters = client.list_adapters(request).await?.into_inner().adapters;
            adapters.into_iter().map(|adapter| adapter.driver).collect()
        }
        Named::Node => {
            let node = client.get_node(v1::GetNodeRequest {}).await?.into_inner();
            BTreeSet::from([node.name])
        }
        // Of the local API.
        Named::Claims | Named::ApiClaims | Named::Classes | Named::Slices => BTreeSet::new(),
    })
}

/// The name of a resource's DeviceClass. `None`: the resource is of no driver.
fn manifest(resource: &v1::Resource) -> Option<String> {
    // no error: a native device plugin has no class, and its address is no name of a driver
    DriverName::new(&resource.driver).ok()?;
    // no error: as above
    let name = ExtendedResource::new(&resource.name).ok()?;
    Some(class_name(&name))
}

fn object_names(objects: &[Value]) -> BTreeSet<String> {
    let names = objects
        .iter()
        .map(|object| local_api::text(object, "/metadata/name"));
    names.map(str::to_owned).collect()
}

/// A name as commands take it: alone in the namespace that they have by default.
fn short(namespace: &str, name: &str, default: &str) -> String {
    if namespace == default {
        name.to_owned()
    } else {
        format!("{namespace}/{name}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn completed_words_name_the_daemon() {
        let root = |line: &str| {
            let location = location(&words(line), Some("/environment".into()));
            location.root.display().to_string()
        };
        assert_eq!(root("nodedock get claims"), "/environment");
        assert_eq!(root("nodedock --root /a get claims"), "/a");
        assert_eq!(root("nodedock get claims --root=/b"), "/b");
        assert_eq!(root("nodedock --root = /c get claims"), "/c");
        assert_eq!(root("nodedock get claims --root"), "/environment");
        let socket = location(&words("nodedock --socket /s get claims"), None);
        assert_eq!(socket.socket, Some(PathBuf::from("/s")));
        assert_eq!(socket.root, PathBuf::from("/"));
    }

    #[test]
    fn word_after_get_names_objects() {
        let named = |line: &str| named_by_get(&words(line));
        assert_eq!(named("nodedock get claims "), Some(Named::Claims));
        assert_eq!(named("nodedock get -o json driver "), Some(Named::Drivers));
        assert_eq!(named("nodedock get nothing "), None);
        assert_eq!(named("nodedock explain claim "), None);
    }

    #[test]
    fn own_namespace_is_left_out() {
        assert_eq!(short("default", "a", "default"), "a");
        assert_eq!(short("ml", "a", "default"), "ml/a");
    }

    #[test]
    fn manifests_are_of_drivers() {
        let resource = |driver: &str| v1::Resource {
            name: "a.dev/gpu".to_owned(),
            driver: driver.to_owned(),
            ..v1::Resource::default()
        };
        assert_eq!(
            manifest(&resource("gpu.a.dev")).as_deref(),
            Some("a.dev-gpu")
        );
        assert_eq!(manifest(&resource("/run/gpu.sock")), None);
    }
}
