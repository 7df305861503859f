"""What nvidia-smi printed on real hosts, with the elements that are read; identifiers are replaced.

Cut down from recordings that people published: a Tesla T4 of a cloud (driver 515), an A100 cut by MIG (535), an RTX
A5000 (590; its processes are those of another recording), and the topologies of hosts with H100s (three of its cards)
and RTX 3090s.
"""

T4_515 = """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v11.dtd">
<nvidia_smi_log>
  <driver_version>515.105.01</driver_version><cuda_version>11.7</cuda_version><attached_gpus>1</attached_gpus>
  <gpu id="00000000:00:1E.0">
    <product_name>Tesla T4</product_name><persistence_mode>Disabled</persistence_mode>
    <mig_mode><current_mig>N/A</current_mig></mig_mode><mig_devices>None</mig_devices>
    <uuid>GPU-00000000-0000-0000-0000-000000000001</uuid>
    <pci><pci_bus_id>00000000:00:1E.0</pci_bus_id><pci_gpu_link_info>
      <pcie_gen><max_link_gen>3</max_link_gen><current_link_gen>3</current_link_gen></pcie_gen>
      <link_widths><max_link_width>16x</max_link_width><current_link_width>8x</current_link_width></link_widths>
    </pci_gpu_link_info></pci>
    <clocks_throttle_reasons>
      <clocks_throttle_reason_gpu_idle>Not Active</clocks_throttle_reason_gpu_idle>
      <clocks_throttle_reason_sw_power_cap>Not Active</clocks_throttle_reason_sw_power_cap>
      <clocks_throttle_reason_sw_thermal_slowdown>Not Active</clocks_throttle_reason_sw_thermal_slowdown>
    </clocks_throttle_reasons>
    <fb_memory_usage><total>15360 MiB</total><reserved>388 MiB</reserved><used>1032 MiB</used></fb_memory_usage>
    <compute_mode>Default</compute_mode>
    <ecc_mode><current_ecc>Enabled</current_ecc></ecc_mode>
    <ecc_errors>
      <volatile><sram_correctable>0</sram_correctable><sram_uncorrectable>0</sram_uncorrectable>
        <dram_correctable>0</dram_correctable><dram_uncorrectable>0</dram_uncorrectable></volatile>
      <aggregate><sram_correctable>0</sram_correctable><sram_uncorrectable>0</sram_uncorrectable>
        <dram_correctable>0</dram_correctable><dram_uncorrectable>0</dram_uncorrectable></aggregate>
    </ecc_errors>
    <retired_pages><pending_retirement>No</pending_retirement></retired_pages>
    <remapped_rows>N/A</remapped_rows>
    <temperature><gpu_temp>40 C</gpu_temp></temperature>
    <power_readings><power_state>P0</power_state><power_draw>26.78 W</power_draw><power_limit>70.00 W</power_limit>
      <default_power_limit>70.00 W</default_power_limit></power_readings>
    <clocks><sm_clock>585 MHz</sm_clock></clocks><max_clocks><sm_clock>1590 MHz</sm_clock></max_clocks>
    <processes></processes>
  </gpu>
</nvidia_smi_log>
"""

A100_535 = """<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
  <driver_version>535.54.03</driver_version><cuda_version>12.2</cuda_version><attached_gpus>4</attached_gpus>
  <gpu id="00000000:01:00.0">
    <product_name>NVIDIA A100-SXM4-80GB</product_name><persistence_mode>Disabled</persistence_mode>
    <mig_mode><current_mig>Enabled</current_mig><pending_mig>Enabled</pending_mig></mig_mode>
    <mig_devices>
      <mig_device><index>0</index><fb_memory_usage><total>19968 MiB</total></fb_memory_usage></mig_device>
      <mig_device><index>1</index><fb_memory_usage><total>19968 MiB</total></fb_memory_usage></mig_device>
      <mig_device><index>2</index><fb_memory_usage><total>19968 MiB</total></fb_memory_usage></mig_device>
      <mig_device><index>3</index><fb_memory_usage><total>19968 MiB</total></fb_memory_usage></mig_device>
    </mig_devices>
    <uuid>GPU-00000000-0000-0000-0000-000000000002</uuid>
    <pci><pci_bus_id>00000000:01:00.0</pci_bus_id><pci_gpu_link_info>
      <pcie_gen><max_link_gen>4</max_link_gen><current_link_gen>4</current_link_gen></pcie_gen>
      <link_widths><max_link_width>16x</max_link_width><current_link_width>16x</current_link_width></link_widths>
    </pci_gpu_link_info></pci>
    <clocks_event_reasons>
      <clocks_event_reason_gpu_idle>Not Active</clocks_event_reason_gpu_idle>
      <clocks_event_reason_applications_clocks_setting>Not Active</clocks_event_reason_applications_clocks_setting>
      <clocks_event_reason_sw_power_cap>Not Active</clocks_event_reason_sw_power_cap>
    </clocks_event_reasons>
    <fb_memory_usage><total>81920 MiB</total><reserved>869 MiB</reserved><used>50 MiB</used></fb_memory_usage>
    <compute_mode>Default</compute_mode>
    <ecc_mode><current_ecc>Enabled</current_ecc></ecc_mode>
    <ecc_errors>
      <volatile><sram_uncorrectable>0</sram_uncorrectable><dram_uncorrectable>0</dram_uncorrectable></volatile>
      <aggregate><sram_uncorrectable>0</sram_uncorrectable><dram_uncorrectable>0</dram_uncorrectable></aggregate>
    </ecc_errors>
    <remapped_rows>N/A</remapped_rows>
    <temperature><gpu_temp>27 C</gpu_temp></temperature>
    <gpu_power_readings><power_draw>67.03 W</power_draw><current_power_limit>500.00 W</current_power_limit>
      <default_power_limit>500.00 W</default_power_limit></gpu_power_readings>
    <clocks><sm_clock>1275 MHz</sm_clock></clocks><max_clocks><sm_clock>1410 MHz</sm_clock></max_clocks>
  </gpu>
</nvidia_smi_log>
"""

A5000_590 = """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v13.dtd">
<nvidia_smi_log>
  <driver_version>590.44.01</driver_version><cuda_version>13.1</cuda_version><attached_gpus>2</attached_gpus>
  <gpu id="00000000:81:00.0">
    <product_name>NVIDIA RTX A5000</product_name><persistence_mode>Enabled</persistence_mode>
    <mig_mode><current_mig>N/A</current_mig></mig_mode><mig_devices>
      None
    </mig_devices>
    <uuid>GPU-00000000-0000-0000-0000-000000000003</uuid>
    <pci><pci_bus_id>00000000:81:00.0</pci_bus_id><pci_gpu_link_info>
      <pcie_gen><max_link_gen>4</max_link_gen><current_link_gen>1</current_link_gen></pcie_gen>
      <link_widths><max_link_width>16x</max_link_width><current_link_width>16x</current_link_width></link_widths>
    </pci_gpu_link_info></pci>
    <clocks_event_reasons>
      <clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
      <clocks_event_reason_applications_clocks_setting>Not Active</clocks_event_reason_applications_clocks_setting>
      <clocks_event_reason_sw_power_cap>Not Active</clocks_event_reason_sw_power_cap>
      <clocks_event_reason_hw_thermal_slowdown>Not Active</clocks_event_reason_hw_thermal_slowdown>
    </clocks_event_reasons>
    <clocks_event_reasons_counters>
      <clocks_event_reasons_counters_sw_power_cap>31637354094 us</clocks_event_reasons_counters_sw_power_cap>
    </clocks_event_reasons_counters>
    <fb_memory_usage><total>24564 MiB</total><reserved>450 MiB</reserved><used>22437 MiB</used></fb_memory_usage>
    <compute_mode>Default</compute_mode>
    <ecc_mode><current_ecc>Disabled</current_ecc></ecc_mode>
    <ecc_errors>
      <volatile><sram_uncorrectable_parity>N/A</sram_uncorrectable_parity>
        <sram_uncorrectable_secded>N/A</sram_uncorrectable_secded>
        <dram_uncorrectable>N/A</dram_uncorrectable></volatile>
      <aggregate><sram_uncorrectable_parity>N/A</sram_uncorrectable_parity>
        <sram_uncorrectable_secded>N/A</sram_uncorrectable_secded>
        <dram_uncorrectable>N/A</dram_uncorrectable></aggregate>
    </ecc_errors>
    <remapped_rows><remapped_row_pending>No</remapped_row_pending>
      <remapped_row_failure>No</remapped_row_failure></remapped_rows>
    <temperature><gpu_temp>13 C</gpu_temp></temperature>
    <gpu_power_readings><power_state>Requested functionality has been deprecated</power_state>
      <average_power_draw>6.41 W</average_power_draw><instant_power_draw>6.52 W</instant_power_draw>
      <current_power_limit>230.00 W</current_power_limit><default_power_limit>230.00 W</default_power_limit>
    </gpu_power_readings>
    <clocks><sm_clock>210 MHz</sm_clock></clocks><max_clocks><sm_clock>2100 MHz</sm_clock></max_clocks>
    <processes>
      <process_info><pid>2921</pid><type>C</type><process_name>VLLM::Worker_TP0</process_name>
        <used_memory>22422 MiB</used_memory></process_info>
      <process_info><pid>812</pid><type>G</type><process_name>/usr/lib/xorg/Xorg</process_name>
        <used_memory>4 MiB</used_memory></process_info>
    </processes>
  </gpu>
</nvidia_smi_log>
"""

H100S = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tNV18\tPXB\tNODE\t0-55,112-167\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tNV18\tNODE\tPXB\t0-55,112-167\t0\t\tN/A\n"
    "GPU2\tNV18\tNV18\t X \tSYS\tSYS\t56-111,168-223\t1\t\tN/A\n"
    "NIC0\tPXB\tNODE\tSYS\t X \tNODE\t\t\t\t\n"
    "NIC1\tNODE\tPXB\tSYS\tNODE\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe as well as the SMP interconnect\n"
    "\nNIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_1\n"
)
RTX3090S = (
    "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
    "GPU0\t X \tNV4\t0-23\t0\t\tN/A\n"
    "GPU1\tNV4\t X \t0-23\t0\t\tN/A\n"
)
