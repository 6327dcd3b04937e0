//! Names of our sockets in a kubelet's folder of device plugins. Pure but for one look at who listens.

use std::path::Path;

use sha2::{Digest, Sha256};

use nodedock_base::device_plugin_sockets::{SocketId, Sockets};
use nodedock_model::{ExtendedResource, Problem, Uid, limit};

const PREFIX: &str = "nodedock-";
const SUFFIX: &str = ".sock";
/// A socket is made under its name with this behind it (`base::socket`).
const TEMPORARY: &str = ".new";
/// Digits of a resource's hash: with 256 resources two are alike once in a billion nodes.
const HASH_DIGITS: usize = 12;
const INSTANCE_DIGITS: usize = 8;

/// The name of a resource's socket, such as `nodedock-gpu-0123456789ab.sock`: as much of the resource's name as fits, then what makes
/// it unique, then the instance, or its hash where the folder's path leaves no room.
pub(super) fn name(
    folder: &Path,
    resource: &ExtendedResource,
    instance: Option<&Uid>,
) -> Result<String, Problem> {
    let room = room(folder);
    let hash = digits(resource.as_str(), HASH_DIGITS);
    let plain = |instance: &str| format!("{PREFIX}{hash}{instance}{SUFFIX}");
    let whole = instance.map_or_else(String::new, |uid| format!("-{uid}"));
    let short =
        instance.map_or_else(String::new, |uid| format!("-{}", digits(uid.as_str(), INSTANCE_DIGITS)));
    let Some(instance) = [whole, short].into_iter().find(|instance| plain(instance).len() <= room) else {
        return Err(too_long(folder));
    };
    let left = room - plain(&instance).len();
    let label = label(resource, left.saturating_sub(1));
    if label.is_empty() {
        return Ok(plain(&instance));
    }
    Ok(format!("{PREFIX}{label}-{hash}{instance}{SUFFIX}"))
}

/// Whether sockets of a folder can be named at all; the error names the fix.
pub(super) fn check(folder: &Path, instance: Option<&Uid>) -> Result<(), Problem> {
    let instance = if instance.is_some() { 1 + INSTANCE_DIGITS } else { 0 };
    let shortest = PREFIX.len() + HASH_DIGITS + instance + SUFFIX.len();
    if shortest <= room(folder) { Ok(()) } else { Err(too_long(folder)) }
}

fn too_long(folder: &Path) -> Problem {
    let bytes_max = limit::SOCKET_PATH_BYTES_MAX;
    let message = format!(
        "sockets in {} would have paths longer than the {bytes_max} bytes that the system allows: choose a shorter --kubelet-root",
        folder.display()
    );
    Problem::invalid("socket-path-too-long", message)
}

/// Bytes of a name in the folder.
fn room(folder: &Path) -> usize {
    limit::SOCKET_PATH_BYTES_MAX.saturating_sub(folder.as_os_str().len() + 1 + TEMPORARY.len())
}

/// The part of a resource's name after its domain, in characters that need no care in a shell.
fn label(resource: &ExtendedResource, bytes_max: usize) -> String {
    let name = resource.as_str().rsplit('/').next().unwrap_or_default();
    let cut: String = name.chars().take(bytes_max.min(32)).collect();
    cut.trim_end_matches(['-', '_', '.']).to_owned()
}

fn digits(text: &str, count: usize) -> String {
    hex::encode(Sha256::digest(text))[..count].to_owned()
}

/// Sockets of other instances for the same resource that were made later than ours.
pub(super) fn newer(
    sockets: &Sockets,
    resource: &ExtendedResource,
    own: &str,
    made: &SocketId,
) -> Vec<String> {
    let hash = digits(resource.as_str(), HASH_DIGITS);
    let is_of_resource = |name: &str| {
        let inner = name.strip_prefix(PREFIX).and_then(|rest| rest.strip_suffix(SUFFIX));
        inner.is_some_and(|inner| inner == hash || inner.split('-').any(|part| part == hash))
    };
    let is_newer = |(name, id): &(&String, &SocketId)| {
        *name != own && is_of_resource(name) && (id.made, *name) > (made.made, &own.to_owned())
    };
    sockets.iter().filter(is_newer).map(|(name, _)| name.clone()).collect()
}

/// Whether somebody accepts on a socket.
pub(super) async fn is_alive(path: &Path) -> bool {
    tokio::net::UnixStream::connect(path).await.is_ok()
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::time::{Duration, SystemTime};

    use super::*;

    const UID: &str = "6f1c2d7e-0f7b-4d1f-9d3b-2a6f0e9c1b11";

    fn resource(name: &str) -> ExtendedResource {
        ExtendedResource::new(name).unwrap()
    }

    #[test]
    fn every_name_fits_or_is_refused_and_resources_and_instances_differ() {
        let uid = Uid::new(UID).unwrap();
        let long = format!("example.com/{}", "x".repeat(63));
        for folder_bytes in 1..120 {
            let folder = PathBuf::from("/".repeat(folder_bytes));
            for instance in [None, Some(&uid)] {
                let named: Vec<_> = ["example.com/gpu", "example.org/gpu", &long]
                    .iter()
                    .map(|name_of| name(&folder, &resource(name_of), instance))
                    .collect();
                assert_eq!(
                    check(&folder, instance).is_ok(),
                    named.iter().all(Result::is_ok),
                    "{folder_bytes}"
                );
                let Ok(names) = named.into_iter().collect::<Result<std::collections::BTreeSet<_>, _>>()
                else {
                    continue;
                };
                assert_eq!(names.len(), 3);
                assert!(names.iter().all(|name| folder_bytes + 1 + name.len() + TEMPORARY.len() <= 107));
            }
        }
        let folder = Path::new("/var/lib/kubelet/device-plugins");
        let gpu = resource("example.com/gpu");
        assert!(name(folder, &gpu, None).unwrap().starts_with("nodedock-gpu-"));
        let own = name(folder, &gpu, Some(&uid)).unwrap();
        assert!(own.starts_with("nodedock-gpu-") && own.ends_with(&format!("-{UID}.sock")), "{own}");
        let words = check(Path::new(&"/x".repeat(60)), None).unwrap_err().message;
        assert!(words.contains("107") && words.contains("--kubelet-root"), "{words}");
    }

    #[test]
    fn of_instances_that_offer_a_resource_the_newest_is_known() {
        let folder = Path::new("/var/lib/kubelet/device-plugins");
        let gpu = resource("example.com/gpu");
        let named = |resource: &ExtendedResource, uid: &str| {
            name(folder, resource, Some(&Uid::new(uid).unwrap())).unwrap()
        };
        let id = |second: u64| SocketId {
            device: 1,
            inode: second,
            made: SystemTime::UNIX_EPOCH + Duration::from_secs(second),
        };
        let (a, b, c) = (named(&gpu, "a"), named(&gpu, "b"), named(&resource("example.com/nic"), "c"));
        let sockets = Sockets::from([
            (a.clone(), id(1)),
            (b.clone(), id(2)),
            (c, id(3)),
            ("kubelet.sock".to_owned(), id(4)),
            ("other-gpu.sock".to_owned(), id(5)),
        ]);
        assert_eq!(newer(&sockets, &gpu, &a, &id(1)), [b.as_str()]);
        assert!(newer(&sockets, &gpu, &b, &id(2)).is_empty());
        let both = Sockets::from([(a.clone(), id(1)), (b.clone(), id(1))]);
        let of = |own: &str| newer(&both, &gpu, own, &id(1)).len();
        assert_eq!(of(&a) + of(&b), 1, "of two that were made at once one is the newer");
    }
}
