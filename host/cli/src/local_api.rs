//! The commands' way to the local API: `nodedock claim`, `nodedock get slices`, `nodedock kubeconfig`.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;
use nodedock_kube::local::{CONTAINER_NAMESPACE, user_namespace};
use nodedock_kube::local_client::LocalClient;
use serde_json::{Value, json};

use super::output::print_text;
use super::{CommandError, Location};
use nodedock_base::file;
use nodedock_base::paths::Paths;
use nodedockd::app::KeptIdentity;

/// The socket of the local API, beside the daemon's own.
const SOCKET: &str = "api.sock";
/// Maximum size of a file that may be replaced: one of this command has some 2 kB.
const KUBECONFIG_BYTES_MAX: u64 = 64 << 10;

/// Connects to the socket of the local API, beside the daemon's own.
pub(super) async fn connect(location: &Location) -> Result<LocalClient> {
    let socket = location.socket().with_file_name(SOCKET);
    LocalClient::connect(&socket).await.map_err(|source| {
        CommandError::NoLocalApi {
            socket,
            source: source.into(),
        }
        .into()
    })
}

/// Returns the claims of the local API that this user may list; none if the daemon has no local API.
pub(super) async fn claims(location: &Location) -> Result<Vec<Value>> {
    let socket = location.socket().with_file_name(SOCKET);
    let client = match LocalClient::connect(&socket).await {
        Ok(client) => client,
        Err(error)
            if matches!(
                error.kind(),
                ErrorKind::NotFound | ErrorKind::ConnectionRefused
            ) =>
        {
            return Ok(Vec::new());
        }
        Err(error) => {
            let source = error.into();
            return Err(CommandError::NoLocalApi { socket, source }.into());
        }
    };
    let own = location.user().map(user_namespace);
    Ok(client.claims(own.as_deref()).await?)
}

/// Returns the namespace of claims whose namespace is not given.
pub(super) fn namespace(location: &Location) -> String {
    let user = location.user().map(user_namespace);
    user.unwrap_or_else(|| CONTAINER_NAMESPACE.to_owned())
}

#[derive(Args)]
pub(super) struct KubeconfigArgs {
    /// Write it to this file, which only you can read (mode 0600); a file that this command did not write is not replaced
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Prints or writes the kubeconfig of the address on which the local API listens.
pub(super) fn kubeconfig(location: &Location, args: KubeconfigArgs) -> Result<()> {
    let path = Paths::below(&location.root).api_identity;
    let kept = KeptIdentity::read(&path)?;
    let Some((kept, address)) = kept.and_then(|kept| kept.address.map(|address| (kept, address)))
    else {
        let hint = "start the daemon with --local-api --local-api-listen 127.0.0.1:7443: kubectl and Go clients have no kubeconfig for a Unix socket";
        return Err(CommandError::usage("the local API has no address", hint).into());
    };
    let text = nodedock_apiserver::kubeconfig(&format!("https://{address}"), &kept.identity());
    match args.output {
        Some(path) => write_kubeconfig(&path, &text),
        None => print_text(text.trim_end()).context("print the kubeconfig"),
    }
}

/// Writes a file that only this user can read, in place of one that is there. No link is followed.
fn write_kubeconfig(path: &Path, text: &str) -> Result<()> {
    let shown = path.display();
    let is_ours = match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => true,
        Err(error) => return Err(error).with_context(|| format!("look at {shown}")),
        Ok(found) => found.is_file() && found.len() <= KUBECONFIG_BYTES_MAX && is_kubeconfig(path)?,
    };
    if !is_ours {
        bail!(
            "{shown} exists, and was not written by this command: remove it, or choose another --output"
        );
    }
    file::replace(path, text.as_bytes()).with_context(|| format!("write {shown}"))
}

/// Returns whether a file is a kubeconfig of this command to which nothing was added.
fn is_kubeconfig(path: &Path) -> Result<bool> {
    let text = std::fs::read(path).with_context(|| format!("read {}", path.display()))?;
    // Another text is another program's.
    let Ok(found) = serde_json::from_slice::<Value>(&text) else {
        return Ok(false);
    };
    let is_named = found["current-context"] == nodedock_apiserver::KUBECONFIG_NAME;
    Ok(is_named
        && ["clusters", "users", "contexts"]
            .into_iter()
            .all(|list| found[list].as_array().is_some_and(|list| list.len() == 1)))
}

/// Returns objects as `kubectl` prints them: the one that was named as it is, others as a list, and without the managers of fields.
pub(super) fn as_kubectl(objects: &[Value], is_named: bool) -> Value {
    let mut objects = objects.to_vec();
    let metadata = objects
        .iter_mut()
        .filter_map(|object| object.get_mut("metadata")?.as_object_mut());
    metadata.for_each(|metadata| drop(metadata.remove("managedFields")));
    match <[Value; 1]>::try_from(objects) {
        Ok([object]) if is_named => object,
        Ok(one) => list(one.into()),
        Err(all) => list(all),
    }
}

fn list(items: Vec<Value>) -> Value {
    let metadata = json!({ "resourceVersion": "" });
    json!({ "apiVersion": "v1", "kind": "List", "metadata": metadata, "items": items })
}

/// A text of an object; empty if it is not there.
pub(super) fn text<'a>(object: &'a Value, pointer: &str) -> &'a str {
    object
        .pointer(pointer)
        .and_then(Value::as_str)
        .unwrap_or_default()
}

/// The devices of an allocated claim, as `DRIVER/POOL/DEVICE`.
pub(super) fn devices(claim: &Value) -> Vec<String> {
    let results = claim
        .pointer("/status/allocation/devices/results")
        .and_then(Value::as_array);
    results
        .into_iter()
        .flatten()
        .map(|of| {
            ["/driver", "/pool", "/device"]
                .map(|field| text(of, field).to_owned())
                .join("/")
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use nodedock_apiserver::{Identity, kubeconfig};

    use super::*;

    fn text(token: &str) -> String {
        let of = |text: &str| text.to_owned();
        let identity = Identity {
            certificate_pem: of("C"),
            key_pem: of("K"),
            token: of(token),
        };
        kubeconfig("https://127.0.0.1:7443", &identity)
    }

    #[test]
    fn objects_have_the_form_of_kubectl() {
        let object = |managers: bool| {
            let mut object = json!({ "kind": "ResourceClaim", "metadata": { "name": "a" } });
            if managers {
                object["metadata"]["managedFields"] = json!([{ "manager": "m" }]);
            }
            object
        };
        assert_eq!(as_kubectl(&[object(true)], true), object(false));
        let list = as_kubectl(&[object(true)], false);
        assert_eq!(
            (&list["kind"], &list["items"]),
            (&json!("List"), &json!([object(false)]))
        );
        assert_eq!(as_kubectl(&[], true)["items"], json!([]));
    }

    #[test]
    fn kubeconfig_is_private_and_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("kubeconfig");
        write_kubeconfig(&path, &text("one")).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).unwrap();
        write_kubeconfig(&path, &text("two")).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), text("two"));
        assert_eq!(
            std::fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o600
        );
        let missing = write_kubeconfig(&directory.path().join("none/kubeconfig"), "").unwrap_err();
        assert!(
            format!("{missing:#}").contains("none/kubeconfig"),
            "{missing:#}"
        );
    }

    #[test]
    fn foreign_file_is_not_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let extended =
            text("one").replace("\"clusters\": [", "\"clusters\": [{ \"name\": \"mine\" },");
        let other = text("one").replace("nodedock", "mine");
        let long = " ".repeat(KUBECONFIG_BYTES_MAX as usize + 1);
        for (name, content) in [
            ("text", "precious"),
            ("empty", ""),
            ("extended", &extended),
            ("other", &other),
            ("long", &long),
        ] {
            std::fs::write(at(name), content).unwrap();
        }
        std::fs::write(at("target"), text("one")).unwrap();
        symlink(at("target"), at("link")).unwrap();
        symlink(at("nothing"), at("dangling")).unwrap();
        std::fs::create_dir(at("directory")).unwrap();
        for name in [
            "text",
            "empty",
            "extended",
            "other",
            "long",
            "link",
            "dangling",
            "directory",
        ] {
            let refused = write_kubeconfig(&at(name), &text("two"))
                .unwrap_err()
                .to_string();
            assert!(
                refused.contains("was not written by this command"),
                "{name}: {refused}"
            );
        }
        assert_eq!(std::fs::read_to_string(at("text")).unwrap(), "precious");
        assert_eq!(std::fs::read_to_string(at("target")).unwrap(), text("one"));
        assert!(!at("nothing").exists());
    }
}
