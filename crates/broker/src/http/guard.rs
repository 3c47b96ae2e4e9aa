//! Which addresses a destination may have: those of the internet, and no others unless the URL says so.
//!
//! Whoever may choose the URL of a webhook, or the DNS entry behind it, could otherwise make this program talk to
//! what only it can reach: its own machine, the network around it, the metadata service of its cloud. So the address is
//! judged, never the name, and it is judged where the connection is made.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// What is permitted beside the internet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Allow {
    /// This machine: `127.0.0.0/8` and `::1`.
    pub loopback: bool,
    /// The network around it: `10.0.0.0/8`, `172.16.0.0/12`, `192.168.0.0/16`, `100.64.0.0/10` and `fc00::/7`.
    pub private: bool,
}

/// Why an address is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refused {
    Loopback,
    Private,
    /// The service that tells a virtual machine its own credentials. No setting permits it.
    Metadata,
    LinkLocal,
    Multicast,
    /// An IPv4 address in an IPv6 one: it would lead past the rules for IPv4.
    Embedded,
    /// Not an address of a machine on the internet.
    Reserved,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Loopback => "it is this machine; `allow_loopback=true` in the URL permits that",
            Self::Private => "it is in a private network; `allow_private=true` in the URL permits that",
            Self::Metadata => "it is a metadata service of a cloud",
            Self::LinkLocal => "it is link-local",
            Self::Multicast => "it is a multicast address",
            Self::Embedded => "it hides an IPv4 address",
            Self::Reserved => "it is not on the internet",
        })
    }
}

/// Metadata services that are not link-local: Azure, Alibaba, Oracle.
const METADATA_V4: [Ipv4Addr; 3] =
    [Ipv4Addr::new(168, 63, 129, 16), Ipv4Addr::new(100, 100, 100, 200), Ipv4Addr::new(192, 0, 0, 192)];

/// Metadata services that have unique local addresses: AWS, Google.
const METADATA_V6: [Ipv6Addr; 2] =
    [Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254), Ipv6Addr::new(0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254)];

impl Allow {
    /// Whether a connection to `address` may be made.
    pub(super) fn check(self, address: IpAddr) -> Result<(), Refused> {
        let found = match address {
            IpAddr::V4(address) => v4(address),
            IpAddr::V6(address) => v6(address),
        };
        match found {
            None => Ok(()),
            Some(Refused::Loopback) if self.loopback => Ok(()),
            Some(Refused::Private) if self.private => Ok(()),
            Some(refused) => Err(refused),
        }
    }
}

fn v4(address: Ipv4Addr) -> Option<Refused> {
    if METADATA_V4.contains(&address) || address == Ipv4Addr::new(169, 254, 169, 254) {
        return Some(Refused::Metadata);
    }
    match address.octets() {
        [127, ..] => Some(Refused::Loopback),
        [10, ..] | [172, 16..=31, ..] | [192, 168, ..] | [100, 64..=127, ..] => Some(Refused::Private),
        [169, 254, ..] => Some(Refused::LinkLocal),
        [224..=239, ..] => Some(Refused::Multicast),
        // "This network", IETF protocols, documentation, 6to4 relays, benchmarks, and what was never given out.
        [0, ..]
        | [192, 0, 0 | 2, _]
        | [192, 88, 99, _]
        | [198, 18 | 19, ..]
        | [198, 51, 100, _]
        | [203, 0, 113, _]
        | [240..=255, ..] => Some(Refused::Reserved),
        _ => None,
    }
}

fn v6(address: Ipv6Addr) -> Option<Refused> {
    if METADATA_V6.contains(&address) {
        return Some(Refused::Metadata);
    }
    match address.segments() {
        [0, 0, 0, 0, 0, 0, 0, 1] => Some(Refused::Loopback),
        [0xfc00..=0xfdff, ..] => Some(Refused::Private),
        [0xfe80..=0xfebf, ..] => Some(Refused::LinkLocal),
        [0xff00..=0xffff, ..] => Some(Refused::Multicast),
        // Mapped, translated (NAT64, also with a local prefix), compatible; 6to4; Teredo; ISATAP.
        [0, 0, 0, 0, 0, 0xffff, ..]
        | [0, 0, 0, 0, 0xffff, 0, ..]
        | [0x64, 0xff9b, ..]
        | [0, 0, 0, 0, 0, 0, 1..=0xffff, _]
        | [0x2002, ..]
        | [0x2001, 0, ..]
        | [_, _, _, _, 0 | 0x200, 0x5efe, ..] => Some(Refused::Embedded),
        // IETF protocols, documentation.
        [0x2001, 0..=0x1ff | 0xdb8, ..] | [0x3fff, 0..=0xfff, ..] => Some(Refused::Reserved),
        [0x2000..=0x3fff, ..] => None,
        // Addresses of machines on the internet are in 2000::/3 and nowhere else.
        _ => Some(Refused::Reserved),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every kind of address: as it is written, and why it is refused.
    const VECTORS: &[(&str, Option<Refused>)] = &[
        ("127.0.0.1", Some(Refused::Loopback)),
        ("127.0.0.2", Some(Refused::Loopback)),
        ("127.1.2.3", Some(Refused::Loopback)),
        ("127.255.255.255", Some(Refused::Loopback)),
        ("126.255.255.255", None),
        ("128.0.0.0", None),
        ("::1", Some(Refused::Loopback)),
        ("10.0.0.0", Some(Refused::Private)),
        ("10.0.0.1", Some(Refused::Private)),
        ("10.255.255.255", Some(Refused::Private)),
        ("9.255.255.255", None),
        ("11.0.0.0", None),
        ("172.16.0.0", Some(Refused::Private)),
        ("172.20.10.1", Some(Refused::Private)),
        ("172.31.255.255", Some(Refused::Private)),
        ("172.15.255.255", None),
        ("172.32.0.0", None),
        ("192.168.0.0", Some(Refused::Private)),
        ("192.168.1.1", Some(Refused::Private)),
        ("192.168.255.255", Some(Refused::Private)),
        ("192.167.255.255", None),
        ("192.169.0.0", None),
        ("100.64.0.0", Some(Refused::Private)),
        ("100.64.0.1", Some(Refused::Private)),
        ("100.127.255.255", Some(Refused::Private)),
        ("100.63.255.255", None),
        ("100.128.0.0", None),
        ("100.100.100.200", Some(Refused::Metadata)),
        ("100.100.100.201", Some(Refused::Private)),
        ("168.63.129.16", Some(Refused::Metadata)),
        ("168.63.129.17", None),
        ("192.0.0.192", Some(Refused::Metadata)),
        ("169.254.169.254", Some(Refused::Metadata)),
        ("169.254.170.2", Some(Refused::LinkLocal)),
        ("169.254.0.0", Some(Refused::LinkLocal)),
        ("169.254.255.255", Some(Refused::LinkLocal)),
        ("169.253.255.255", None),
        ("169.255.0.0", None),
        ("0.0.0.0", Some(Refused::Reserved)),
        ("0.0.0.1", Some(Refused::Reserved)),
        ("0.255.255.255", Some(Refused::Reserved)),
        ("1.0.0.0", None),
        ("192.0.0.0", Some(Refused::Reserved)),
        ("192.0.0.8", Some(Refused::Reserved)),
        ("192.0.0.255", Some(Refused::Reserved)),
        ("192.0.1.0", None),
        ("192.0.2.1", Some(Refused::Reserved)),
        ("192.0.3.0", None),
        ("192.88.99.1", Some(Refused::Reserved)),
        ("192.88.98.255", None),
        ("192.88.100.0", None),
        ("198.17.255.255", None),
        ("198.18.0.0", Some(Refused::Reserved)),
        ("198.19.255.255", Some(Refused::Reserved)),
        ("198.20.0.0", None),
        ("198.51.100.7", Some(Refused::Reserved)),
        ("198.51.99.255", None),
        ("198.51.101.0", None),
        ("203.0.113.9", Some(Refused::Reserved)),
        ("203.0.112.255", None),
        ("203.0.114.0", None),
        ("223.255.255.255", None),
        ("224.0.0.1", Some(Refused::Multicast)),
        ("239.255.255.255", Some(Refused::Multicast)),
        ("240.0.0.1", Some(Refused::Reserved)),
        ("254.255.255.255", Some(Refused::Reserved)),
        ("255.255.255.255", Some(Refused::Reserved)),
        ("1.1.1.1", None),
        ("8.8.8.8", None),
        ("93.184.215.14", None),
        ("::", Some(Refused::Reserved)),
        ("::2", Some(Refused::Reserved)),
        ("::7f00:1", Some(Refused::Embedded)),
        ("::127.0.0.1", Some(Refused::Embedded)),
        ("::8.8.8.8", Some(Refused::Embedded)),
        ("::ffff:127.0.0.1", Some(Refused::Embedded)),
        ("::ffff:7f00:1", Some(Refused::Embedded)),
        ("::ffff:10.0.0.1", Some(Refused::Embedded)),
        ("::ffff:169.254.169.254", Some(Refused::Embedded)),
        ("::ffff:8.8.8.8", Some(Refused::Embedded)),
        ("::ffff:0:127.0.0.1", Some(Refused::Embedded)),
        ("64:ff9b::7f00:1", Some(Refused::Embedded)),
        ("64:ff9b::10.0.0.1", Some(Refused::Embedded)),
        ("64:ff9b::8.8.8.8", Some(Refused::Embedded)),
        ("64:ff9b:1::10.0.0.1", Some(Refused::Embedded)),
        ("64:ff9b:1:ffff::a9fe:a9fe", Some(Refused::Embedded)),
        ("2002:7f00:1::", Some(Refused::Embedded)),
        ("2002:a00:1::1", Some(Refused::Embedded)),
        ("2002:a9fe:a9fe::1", Some(Refused::Embedded)),
        ("2002::1", Some(Refused::Embedded)),
        ("2002:ffff:ffff:ffff:ffff:ffff:ffff:ffff", Some(Refused::Embedded)),
        ("2001::1", Some(Refused::Embedded)),
        ("2001:0:4136:e378:8000:63bf:3fff:fdd2", Some(Refused::Embedded)),
        ("2600::5efe:7f00:1", Some(Refused::Embedded)),
        ("2600::200:5efe:10.0.0.1", Some(Refused::Embedded)),
        ("fe80::5efe:127.0.0.1", Some(Refused::LinkLocal)),
        ("2001:1::1", Some(Refused::Reserved)),
        ("2001:2::1", Some(Refused::Reserved)),
        ("2001:10::1", Some(Refused::Reserved)),
        ("2001:20::1", Some(Refused::Reserved)),
        ("2001:1ff:ffff::1", Some(Refused::Reserved)),
        ("2001:200::1", None),
        ("2001:db8::1", Some(Refused::Reserved)),
        ("2001:db8:ffff::1", Some(Refused::Reserved)),
        ("2001:db7::1", None),
        ("2001:db9::1", None),
        ("3fff::1", Some(Refused::Reserved)),
        ("3fff:fff::1", Some(Refused::Reserved)),
        ("3fff:1000::1", None),
        ("fc00::1", Some(Refused::Private)),
        ("fd00::1", Some(Refused::Private)),
        ("fdff:ffff::1", Some(Refused::Private)),
        ("fd00:ec2::254", Some(Refused::Metadata)),
        ("fd20:ce::254", Some(Refused::Metadata)),
        ("fd00:ec2::253", Some(Refused::Private)),
        ("fe80::1", Some(Refused::LinkLocal)),
        ("fe80::a9fe:a9fe", Some(Refused::LinkLocal)),
        ("febf::1", Some(Refused::LinkLocal)),
        ("fec0::1", Some(Refused::Reserved)),
        ("feff::1", Some(Refused::Reserved)),
        ("ff00::1", Some(Refused::Multicast)),
        ("ff02::1", Some(Refused::Multicast)),
        ("ff0e::1", Some(Refused::Multicast)),
        ("ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", Some(Refused::Multicast)),
        ("100::1", Some(Refused::Reserved)),
        ("100:0:0:1::1", Some(Refused::Reserved)),
        ("400::1", Some(Refused::Reserved)),
        ("1000::1", Some(Refused::Reserved)),
        ("1fff::1", Some(Refused::Reserved)),
        ("4000::1", Some(Refused::Reserved)),
        ("5f00::1", Some(Refused::Reserved)),
        ("8000::1", Some(Refused::Reserved)),
        ("e000::1", Some(Refused::Reserved)),
        ("fb00::1", Some(Refused::Reserved)),
        ("2000::1", None),
        ("2606:4700:4700::1111", None),
        ("2a00:1450:4001:80b::200e", None),
        ("2620:fe::fe", None),
        ("2003::1", None),
        ("3ffe::1", None),
    ];

    #[test]
    fn only_the_internet_is_reached_unless_more_is_allowed() {
        let nothing = Allow::default();
        let all = Allow { loopback: true, private: true };
        let loopback = Allow { loopback: true, private: false };
        for (text, expected) in VECTORS {
            let address: IpAddr = text.parse().expect(text);
            assert_eq!(nothing.check(address).err(), *expected, "{text}");
            let local = matches!(expected, None | Some(Refused::Loopback));
            assert_eq!(loopback.check(address).is_ok(), local, "{text} with allow_loopback");
            let near = local || *expected == Some(Refused::Private);
            assert_eq!(all.check(address).is_ok(), near, "{text} with everything allowed");
        }
    }
}
