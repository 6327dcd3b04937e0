//! Mounts that a driver alone has: only root may make them, and not everywhere.

use std::path::Path;

/// Runs a shell script in a mount namespace of its own. Its `$0` is a path, its arguments a program and that program's arguments.
const IN_MOUNTS: [&str; 6] = [
    "unshare",
    "--mount",
    "--propagation=private",
    "--",
    "sh",
    "-c",
];
/// Mounts the directory read-only upon itself: no mode keeps root from writing.
const READ_ONLY: &str = r#"mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@""#;
const BOOT_ID: &str = r#"mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@""#;

/// The words before a command that give it a directory which it cannot write.
///
/// # Errors
///
/// Why that is not possible here.
pub(crate) async fn read_only(directory: &Path) -> Result<Vec<String>, String> {
    tried(READ_ONLY, directory).await
}

/// The words before a command that give it the content of a file as the boot ID of the kernel.
///
/// # Errors
///
/// Why that is not possible here.
pub(crate) async fn boot_id(file: &Path) -> Result<Vec<String>, String> {
    tried(BOOT_ID, file).await
}

async fn tried(script: &str, path: &Path) -> Result<Vec<String>, String> {
    let path = path.to_str().ok_or("the path is not UTF-8")?;
    let words: Vec<String> = IN_MOUNTS
        .into_iter()
        .chain([script, path])
        .map(str::to_owned)
        .collect();
    let tried = tokio::process::Command::new(&words[0])
        .args(&words[1..])
        .arg("true")
        .output()
        .await;
    match tried {
        Ok(tried) if tried.status.success() => Ok(words),
        Ok(tried) => Err(String::from_utf8_lossy(&tried.stderr).trim().to_owned()),
        Err(error) => Err(format!("{}: {error}", words[0])),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn boot_id_file_replaces_real_one() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("boot-id");
        assert!(boot_id(&file).await.is_err());
        std::fs::write(&file, "another boot\n").unwrap();
        let Ok(words) = boot_id(&file).await else {
            assert!(
                read_only(directory.path()).await.is_err(),
                "root may mount here, and not over the boot ID"
            );
            return;
        };
        let seen = std::process::Command::new(&words[0])
            .args(&words[1..])
            .args(["cat", "/proc/sys/kernel/random/boot_id"])
            .output()
            .unwrap();
        assert_eq!(String::from_utf8(seen.stdout).unwrap(), "another boot\n");
        assert_ne!(
            std::fs::read("/proc/sys/kernel/random/boot_id").unwrap(),
            b"another boot\n"
        );
    }
}
