//! The host's ceiling for files of the node outside `/sys` and `/dev`: what a grant may name at all.

use std::sync::LazyLock;

use super::pattern::PatternSet;

/// Where libraries, firmware and facts of vendors and of the kernel are.
static READABLE: LazyLock<PatternSet> = LazyLock::new(|| {
    patterns(&[
        "/proc/driver/**",
        "/proc/{cpuinfo,devices,filesystems,meminfo,modules}",
        "/usr/{lib,lib32,lib64,libx32,libexec,share}/**",
        "/usr/local/{lib,lib64,share}/**",
        "/{lib,lib32,lib64,libx32}/**",
        "/opt/**",
        "/etc/*/**",
    ])
});

/// Accounts, keys, and the configuration of the node's own services.
static DENIED: LazyLock<PatternSet> = LazyLock::new(|| {
    patterns(&[
        "/etc/{NetworkManager,X11,alternatives,apparmor,apparmor.d,apt,audit,ca-certificates,cloud,cni}/**",
        "/etc/{containerd,containers,credstore,credstore.encrypted,crio,default,dhcp,dnf,docker,fapolicyd}/**",
        "/etc/{grub.d,init.d,ipsec.d,iscsi,kubernetes,letsencrypt,libvirt,lvm,machine-info.d,multipath}/**",
        "/etc/{netplan,network,nodedock,nvme,openvpn,pam.d,pki,polkit-1,ppp,profile.d,rancher,samba}/**",
        "/etc/{security,selinux,skel,ssh,ssl,strongswan,sudoers.d,sysconfig,systemd,tpm2-tss,udev}/**",
        "/etc/{wireguard,wpa_supplicant,xdg,yum,yum.repos.d}/**",
        "/etc/{cron,krb5,rc,apt,pki,security,sssd,swanctl}*/**",
        "**/*.{key,pem,p12,pfx,jks,keytab}",
        "**/*{secret,Secret,password,passwd,credential,token}*",
        "**/*{secret,Secret,password,passwd,credential,token}*/**",
    ])
});

fn patterns(texts: &[&str]) -> PatternSet {
    PatternSet::new(texts.iter().copied()).expect("the patterns above are globs")
}

/// Returns whether drivers may read this file or directory, if it is granted. `path` is absolute, plain and without links.
pub fn is_readable_host_file(path: &str) -> bool {
    READABLE.matches(path) && !DENIED.matches(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_and_facts_of_vendors_are_readable_and_secrets_are_not() {
        for path in [
            "/proc/driver/nvidia/version",
            "/proc/devices",
            "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
            "/usr/lib64/libcuda.so",
            "/lib/firmware/amdgpu/a.bin",
            "/opt/rocm/lib/libhsa.so",
            "/etc/vulkan/icd.d/nvidia_icd.json",
        ] {
            assert!(is_readable_host_file(path), "{path}");
        }
        for path in [
            "/etc/shadow",
            "/etc/ssh/ssh_host_rsa_key",
            "/etc/ssl/private/a.crt",
            "/etc/kubernetes/admin.conf",
            "/etc/nodedock/config.yaml",
            "/etc/vendor/server.key",
            "/etc/vendor/api-token",
            "/opt/agent/credentials.json",
            "/opt/agent/secrets/of/a.conf",
            "/proc/1/environ",
            "/proc/kcore",
            "/proc/driver",
            "/root/.ssh/id_rsa",
            "/home/a/b",
            "/var/lib/kubelet/pki/a",
            "/usr/bin/sh",
            "/run/secrets/a",
            "/libfoo/a",
            "/",
        ] {
            assert!(!is_readable_host_file(path), "{path}");
        }
    }
}
