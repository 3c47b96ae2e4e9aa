// Reads and writes a JetStream with the client that the nats command is made of, as somebody would who has never heard
// of Postrider.
//
//	nats_client URL sub SUBJECT COUNT
//	nats_client URL pub SUBJECT DATA [HEADER=VALUE ...]
package main

import (
	"fmt"
	"log"
	"os"
	"sort"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
)

func main() {
	if len(os.Args) < 5 {
		log.Fatal("usage: nats_client URL sub SUBJECT COUNT | URL pub SUBJECT DATA [HEADER=VALUE ...]")
	}
	url, what, subject, rest := os.Args[1], os.Args[2], os.Args[3], os.Args[4:]
	connection, err := nats.Connect(url)
	check(err)
	defer connection.Close()
	stream, err := connection.JetStream()
	check(err)
	if what == "pub" {
		publish(stream, subject, rest[0], rest[1:])
	} else {
		count, err := strconv.Atoi(rest[0])
		check(err)
		subscribe(stream, subject, count)
	}
}

func publish(stream nats.JetStreamContext, subject, data string, headers []string) {
	message := nats.NewMsg(subject)
	message.Data = []byte(data)
	for _, header := range headers {
		name, value, _ := strings.Cut(header, "=")
		message.Header.Set(name, value)
	}
	_, err := stream.PublishMsg(message)
	check(err)
}

func subscribe(stream nats.JetStreamContext, subject string, count int) {
	subscription, err := stream.SubscribeSync(subject, nats.OrderedConsumer())
	check(err)
	for ; count > 0; count-- {
		message, err := subscription.NextMsg(30 * time.Second)
		check(err)
		fmt.Printf("%s %s\n", message.Subject, message.Data)
		var lines []string
		for name, values := range message.Header {
			lines = append(lines, fmt.Sprintf("  %s: %s\n", name, strings.Join(values, ", ")))
		}
		sort.Strings(lines)
		fmt.Print(strings.Join(lines, ""))
	}
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
